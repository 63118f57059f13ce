"""Draws maps of layers by heads, with a number in each cell if it fits. `head_map` uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkv.client.figures.heat_maps import Labels, Panel, draw_panels
from qkv.client.figures.scale import Scale

_CELL: Final = (0.46, 0.3)  # inches


def draw_heads(
    layers: Sequence[str],
    tables: Mapping[str, Sequence[Sequence[float]]],
    heads: int,
    *,
    title: str,
    value_name: str,
    limits: tuple[float, float] | None,
    shared_scale: bool,
    ax: Axes | None,
) -> Figure:
    """Returns the figure.

    Args:
        layers: short names.
        tables: a name, and numbers of each layer's heads, for each panel; NaN: no value.
        heads: the largest number of heads of a layer.
        title, value_name, limits, shared_scale, ax: as for `head_map` and `head_maps`.
    """
    matrices = [_matrix(rows, heads) for rows in tables.values()]
    panels = [
        Panel(
            " ".join(name.split()),
            matrix,
            Labels("", layers),
            Labels("head"),
            None,
            _CELL,
            _numbers(matrix),
        )
        for name, matrix in zip(tables, matrices, strict=True)
    ]
    groups = [matrices] if shared_scale else [[matrix] for matrix in matrices]
    scales = [Scale.linear(group, limits) for group in groups]
    figure = draw_panels(panels, scales, title=title, value_name=value_name, ax=ax)
    axes = [ax] if ax is not None else figure.axes[: len(panels)]
    for panel_ax, rows in zip(axes, tables.values(), strict=True):
        missing = [(j, i) for i, row in enumerate(rows) for j, x in enumerate(row) if x != x]
        if missing:
            panel_ax.plot(*zip(*missing, strict=True), "x", color="0.6", label="no value")
    return figure


def _matrix(rows: Sequence[Sequence[float]], heads: int) -> np.ndarray:
    """Returns the numbers (layers, heads); NaN for none."""
    matrix_LH = np.full((len(rows), heads), math.nan)
    for i, row in enumerate(rows):
        matrix_LH[i, : len(row)] = row
    return matrix_LH


def _numbers(matrix_LH: np.ndarray) -> list[list[str]]:
    """Returns the text of each number, all with as many decimals; "" for NaN."""
    finite = matrix_LH[np.isfinite(matrix_LH)]
    largest = float(np.abs(finite).max(initial=0))
    if (finite == np.round(finite)).all() or not largest:
        decimals = 0
    else:
        exponent = math.floor(math.log10(largest))
        decimals = max(0, 2 - exponent) if largest >= 1 else 1 - exponent
    minus = "−" if mpl.rcParams["axes.unicode_minus"] else "-"
    return [
        ["" if x != x else f"{x + 0.0:.{decimals}f}".replace("-", minus) for x in row]
        for row in matrix_LH.round(decimals).tolist()
    ]
