"""The HTML that a notebook shows for a run: its weights as a heat map, one panel for each head.

`Run._repr_html_` uses `run_html`.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from qkv import heatmap
from qkv.client.arrays import to_raw
from qkv.heatmap import Panel

__all__ = ["Picture", "build_picture", "run_html"]

Form: TypeAlias = str | Mapping[str, Any]

_MAX_PANELS: Final = 16  # panels
_MAX_ROWS: Final = 32  # heads in a panel of statistics
# (largest number of panels, pixels a panel, cells a panel): 16,384 cells in all are about 200 KB
_SIZES: Final = ((1, 360, 120), (4, 208, 64), (_MAX_PANELS, 160, 32))
_STATISTICS: Final = {
    "entropy": ("entropy, nats", "query"),
    "largest": ("largest weight", "query"),
    "effective_keys": ("effective keys", "query"),
    "received": ("received by a key", "key"),
}
_SHADES: Final = "Shades show the square root, from 0 to the panel's largest number."
_SIGNED: Final = f"{_SHADES} Negative numbers are orange."


class Picture(NamedTuple):
    """The panels of a heat map.

    Attributes:
        panels: at least one.
        columns: panels in a row.
        side: width of a panel in pixels.
        caption: sentences about the panels.
    """

    panels: Sequence[Panel]
    columns: int
    side: int
    caption: str


def run_html(
    variant: str,
    outputs: Mapping[str, Any],
    timing: Mapping[str, Any],
    weights_are: str | None,
    form: Form,
) -> str:
    """Returns variant, timing and outputs as HTML, with a picture of any weights.

    The picture is an <img>: styles neither enter nor leave it, and it runs no script. It follows
    the reader's choice of light or dark.
    """
    arrays = {name: to_raw(array).numpy() for name, array in outputs.items()}
    heading = f"{variant}, {weights_are} weights" if weights_are else variant
    lines = []
    if (picture := build_picture(arrays, form)) is not None:
        title = f"Attention weights of {variant}"
        svg = heatmap.draw(
            heading,
            title,
            picture.caption,
            picture.panels,
            columns=picture.columns,
            side=picture.side,
        )
        source = f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
        alt = escape(f"{title}. {picture.caption}")
        lines.append(f'<img style="max-width:100%;height:auto" src="{source}" alt="{alt}">')
        lines.append(f"<div><small>{escape(picture.caption)}</small></div>")
    else:
        lines.append(f"<div><b>{escape(heading)}</b></div>")
    timing_text = f"{timing['compute_ms']:.3g} ms on {timing['device']} ({timing['backend']})"
    shapes = [f"{n} {a.dtype.name} {'×'.join(map(str, a.shape))}" for n, a in arrays.items()]
    lines.append(f"<div><small>{escape(', '.join([timing_text, *shapes]))}</small></div>")
    return "\n".join(lines)


def build_picture(arrays: Mapping[str, np.ndarray], form: Form) -> Picture | None:
    """Returns the panels of a run's weights in this form; None if the outputs have no weights.

    Pools matrices that are too large: a cell is the sum over adjacent keys, and the mean over
    adjacent queries. A smaller cell at an edge is scaled to the size of the others.
    """
    if "entropy" in arrays:
        return _statistics(arrays)
    weights, indices = arrays.get("weights"), arrays.get("indices")
    if weights is None or weights.ndim < 2 or not weights.size:
        return None
    planes, kind, notes = _first_planes(weights, 2, _MAX_PANELS)
    rows, columns = weights.shape[-2:]
    if indices is not None:
        notes.append(f"Only the {columns:,} largest weights of each query are shown.")
        columns = int(indices.max()) + 1
    side, cells = next((s, c) for most, s, c in _SIZES if len(planes) <= most)
    tall, wide = math.ceil(rows / cells), math.ceil(columns / cells)
    if indices is None:
        matrices = [_pool(plane, tall, wide) for plane in planes]
    else:
        index_planes = _first_planes(indices, 2, _MAX_PANELS)[0]
        matrices = [
            _pool_indexed(plane, at, columns, tall, wide)
            for plane, at in zip(planes, index_planes, strict=True)
        ]
    row_axis, column_axis = _axis_labels(form, rows, columns)
    panels = [
        Panel(f"{kind} {n}" if len(planes) > 1 else "", matrix, row_axis, column_axis)
        for n, matrix in enumerate(matrices)
    ]
    if tall * wide > 1:
        queries, keys = _count_label(tall, "query", "queries"), _count_label(wide, "key", "keys")
        notes.append(
            f"A cell is {queries} by {keys}: the sum over the keys, the mean over the queries."
        )
    if not np.isfinite(weights).all():
        notes.append("Numbers that are not finite are left out.")
    notes.append(_SIGNED if any((matrix < 0).any() for matrix in matrices) else _SHADES)
    return Picture(panels, 4, side, " ".join(notes))


def _statistics(arrays: Mapping[str, np.ndarray]) -> Picture:
    """Returns a panel for each statistic, with a row for each head."""
    side, cells = _SIZES[1][1:]
    panels: list[Panel] = []
    notes: list[str] = []
    means = {}
    for name, (title, axis) in _STATISTICS.items():
        rows, kind, notes = _first_planes(arrays[name], 1, _MAX_ROWS)
        count = rows.shape[-1]
        wide = math.ceil(count / cells)
        panels.append(Panel(title, _pool(rows, 1, wide) / wide, kind, _range_label(axis, count)))
        means[axis] = wide
    if max(means.values()) > 1:
        queries = _count_label(means["query"], "query", "queries")
        notes.append(
            f"A cell is the mean of {queries}, or of {_count_label(means['key'], 'key', 'keys')}."
        )
    return Picture(panels, 2, side, " ".join([*notes, _SHADES]))


def _first_planes(array: np.ndarray, rank: int, most: int) -> tuple[np.ndarray, str, list[str]]:
    """Returns the first `most` arrays of this rank, their kind (head or sequence), and notes."""
    notes = []
    kind = "head" if array.ndim - rank > 1 else "sequence"
    if kind == "head":
        if len(array) > 1:
            notes.append(f"Only the first of {len(array):,} sequences is shown.")
        array = array[0]
    planes = array.reshape(-1, *array.shape[array.ndim - rank :])
    if len(planes) > most:
        notes.append(f"Only the first {most} of {len(planes):,} {kind}s are shown.")
    return planes[:most], kind, notes


def _pool(plane: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Returns cells of `tall` rows, by their mean, and `wide` columns, by their sum."""
    rows, columns = plane.shape
    finite = np.where(np.isfinite(plane), plane, 0)
    with np.errstate(over="ignore"):
        summed = np.add.reduceat(finite, np.arange(0, columns, wide), axis=1, dtype=np.float64)
        total = np.add.reduceat(summed, np.arange(0, rows, tall), axis=0)
    return _scale_edges(total, rows, columns, tall, wide)


def _pool_indexed(
    plane: np.ndarray, indices: np.ndarray, columns: int, tall: int, wide: int
) -> np.ndarray:
    """Does the same for weights that are given at some indices only."""
    rows = len(plane)
    total = np.zeros((math.ceil(rows / tall), math.ceil(columns / wide)))
    row = np.broadcast_to(np.arange(rows)[:, None] // tall, plane.shape)
    valid = (indices >= 0) & np.isfinite(plane)
    np.add.at(total, (row[valid], indices[valid] // wide), plane[valid])
    return _scale_edges(total, rows, columns, tall, wide)


def _scale_edges(total: np.ndarray, rows: int, columns: int, tall: int, wide: int) -> np.ndarray:
    """Returns the means over rows, with edge cells scaled to `wide` columns."""
    size_R1, size_1C = (
        np.diff([*range(0, size, step), size]) for size, step in ((rows, tall), (columns, wide))
    )
    even: np.ndarray = np.nan_to_num(total) / size_R1[:, None] * (wide / size_1C)
    return even


def _axis_labels(form: Form, rows: int, columns: int) -> tuple[str, str]:
    """Returns the labels of the rows and of the columns."""
    if isinstance(form, Mapping) and "pool" in form:
        return _range_label("bin of queries", rows), _range_label("bin of keys", columns)
    if isinstance(form, Mapping) and "rows" in form:
        row_names = [f"{row:,}" for row in form["rows"]]
        row_axis = (
            f"query {', '.join(row_names)}"
            if len(row_names) <= 4
            else f"{rows:,} queries, as requested"
        )
        return row_axis, _range_label("key", columns)
    return _range_label("query", rows), _range_label("key", columns)


def _range_label(what: str, count: int) -> str:
    return f"{what} 0 to {count - 1:,}" if count > 1 else f"{what} 0"


def _count_label(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
