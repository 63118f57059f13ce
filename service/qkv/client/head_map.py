"""Draws a number for each head of each layer of a model, as a heat map of layers by heads.

The numbers may be any statistic of a head: its entropy, its mean distance, an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.client.arrays import is_array, to_raw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def head_map(
    layers: Sequence[str],
    values: Any,
    *,
    title: str = "",
    value_name: str = "",
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draws a number for each head of each layer. A head without a value has a cross.

    Args:
        layers: the names of the layers, one for each row. The figure leaves out their common
            beginning and end.
        values: (number of layers, H), an array or lists. A list may be shorter if its layer has
            fewer heads. None or NaN is a head without a value.
        title: above the map; "": none.
        value_name: beside the colour bar, such as "entropy, nats".
        limits: the ends of the colour scale; numbers outside have the colours of the ends. By
            default 0 to the largest number. If a number or limit is negative and another positive,
            the scale has the same size on both sides of 0. Colours are linear.
        ax: axes of matplotlib to draw into; None: a new figure.

    Raises:
        ValueError: the values do not fit the layers, or are no finite numbers.
        ModuleNotFoundError: matplotlib is not installed.
    """
    return head_maps(layers, {"": values}, title=title, value_name=value_name, limits=limits, ax=ax)


def head_maps(
    layers: Sequence[str],
    values: Mapping[str, Any],
    *,
    title: str = "",
    value_name: str = "",
    limits: tuple[float, float] | None = None,
    shared_scale: bool = True,
    ax: Axes | None = None,
) -> Figure:
    """Draws maps of the same layers side by side, such as one for each variant.

    Args:
        layers, title, value_name, limits: as for `head_map`.
        values: a name, and values as for `head_map`, for each panel.
        shared_scale: True gives all panels one colour scale, False each panel its own.
        ax: axes of matplotlib to draw the only map into; None: a new figure.

    Raises:
        ValueError: the values do not fit the layers, or are no finite numbers; or there are none,
            or `ax` is for one map and there are more.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from qkv.client.figures.head_panels import draw_heads  # needs matplotlib

    names = [str(layer) for layer in layers]
    if not names or not values:
        raise ValueError("a map needs layers and values: got none, expected at least one of each")
    if limits is not None:
        _check_limits(limits)
    tables = {name: _rows(_label_of(name), matrix, names) for name, matrix in values.items()}
    heads = max(len(row) for rows in tables.values() for row in rows)
    if not heads:
        raise ValueError("values has no head: expected at least one number")
    return draw_heads(
        _layer_labels(names), tables, heads, title=title, value_name=value_name, limits=limits,
        shared_scale=shared_scale, ax=ax,
    )  # fmt: skip


def _label_of(name: str) -> str:
    return f"values[{name!r}]" if name else "values"


def _rows(label: str, values: Any, layers: Sequence[str]) -> list[list[float]]:
    """Returns the numbers of each layer, NaN for None."""
    rows: list[Any] = list(_array(values, label)) if is_array(values) else list(values)
    if len(rows) != len(layers):
        raise ValueError(
            f"{label} has the wrong number of rows: got {len(rows)}, expected {len(layers)}, one "
            "for each layer"
        )
    table = []
    for layer, row in zip(layers, rows, strict=True):
        try:
            inner = _array(row, label).tolist() if is_array(row) else list(row)
            numbers = [math.nan if x is None else float(x) for x in inner]
        except (TypeError, ValueError):
            raise ValueError(
                f"{label} is invalid for layer {layer}: got {row!r:.60}, expected a number for "
                "each head, or None"
            ) from None
        if any(math.isinf(x) for x in numbers):
            raise ValueError(
                f"{label} is not finite for layer {layer}: got an infinite number, expected finite "
                "numbers, NaN or None"
            )
        table.append(numbers)
    return table


def _array(values: Any, name: str) -> np.ndarray:
    array = to_raw(values, name).numpy()
    return array.astype(np.float64)


def _check_limits(limits: tuple[float, float]) -> None:
    low, high = map(float, limits)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"limits is invalid: got {limits}, expected two rising finite numbers")


def _layer_labels(names: Sequence[str]) -> list[str]:
    """Returns the names without the parts that all of them begin and end with.

    A number alone says little, so it keeps the part before it: "layer.3".
    """
    parts = [name.split(".") for name in names]
    first = last = 0
    if len(set(names)) > 1:
        least = min(map(len, parts))
        while first < least - 1 and len({tuple(p[: first + 1]) for p in parts}) == 1:
            first += 1
        while last < least - 1 - first and len({tuple(p[-last - 1 :]) for p in parts}) == 1:
            last += 1
    kept = [p[first : len(p) - last] for p in parts]
    if first and all(k[0].isdigit() for k in kept):
        kept = [p[first - 1 : len(p) - last] for p in parts]
    return [".".join(k) for k in kept]
