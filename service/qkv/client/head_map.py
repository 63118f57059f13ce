"""Draws a number for each head of each layer of a model, as a heat map of layers by heads.

The numbers may be any statistic of a head: its entropy, its mean distance, an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from qkv.client.arrays import is_array, to_raw
from qkv.client.figures.figure import Figure, draw
from qkv.client.figures.grid import Grid, Panel, grid_columns
from qkv.client.figures.labels import Axis, Label, shorten, text_width, visible
from qkv.client.figures.scale import Scale

__all__ = ["head_map", "head_maps"]

_NAME_COLUMNS: Final = 28  # of a layer's label
_NUMBER_SIZE: Final = 10  # pixels
_CELL: Final = (40, 26)  # largest width and height of a cell, pixels
_SIDES: Final = ((1, 680, 620), (2, 400, 480), (4, 330, 420))  # (panels, width, height)
_SMALL: Final = (250, 320)


def head_map(
    layers: Sequence[str],
    values: Any,
    *,
    title: str = "",
    value_name: str = "",
    caption: str = "",
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draws a number for each head of each layer.

    Args:
        layers: the names of the layers, one for each row. The figure leaves out their common
            beginning and end; the whole name is a tooltip.
        values: (number of layers, H), an array or lists. A list may be shorter if its layer has
            fewer heads. None or NaN is a head without a value.
        title: above the map; "": none.
        value_name: beside the legend, such as "entropy, nats".
        caption: sentences below the map.
        limits: the ends of the colour scale; numbers outside have the colours of the ends. By
            default 0 to the largest number, or the same size on both sides of 0 if a number is
            negative. Colours are linear.

    Raises:
        ValueError: the values do not fit the layers, or are no finite numbers.
    """
    return head_maps(
        layers, {"": values}, title=title, value_name=value_name, caption=caption, limits=limits
    )


def head_maps(
    layers: Sequence[str],
    values: Mapping[str, Any],
    *,
    title: str = "",
    value_name: str = "",
    caption: str = "",
    limits: tuple[float, float] | None = None,
    shared_scale: bool = True,
) -> Figure:
    """Draws maps of the same layers side by side, such as one for each variant.

    Args:
        layers, title, value_name, caption, limits: as for `head_map`.
        values: a name, and values as for `head_map`, for each panel.
        shared_scale: True gives all panels one colour scale, False each panel its own.

    Raises:
        ValueError: the values do not fit the layers, or are no finite numbers; or there are none.
    """
    names = [str(layer) for layer in layers]
    if not names or not values:
        raise ValueError("a map needs layers and values: got none, expected at least one of each")
    tables = {name: _rows(_label_of(name), found, names) for name, found in values.items()}
    widest = max(len(row) for rows in tables.values() for row in rows)
    if not widest:
        raise ValueError("values has no head: expected at least one number")
    numbers = {name: [x for row in rows for x in row if x == x] for name, rows in tables.items()}
    shared = _scale([x for found in numbers.values() for x in found], limits)
    labels = _layer_labels(names)
    panels = [
        _panel(
            " ".join(name.split()), rows, widest, names, labels,
            shared if shared_scale else _scale(numbers[name], limits), len(tables),
        )
        for name, rows in tables.items()
    ]  # fmt: skip
    columns = grid_columns(len(panels))
    has_one_scale = shared_scale or len(panels) == 1
    named = value_name or "a number for each head"
    return draw(Grid(title, caption, panels, columns, value_name, has_one_scale, named))


def _label_of(name: str) -> str:
    return f"values[{name!r}]" if name else "values"


def _rows(label: str, values: Any, layers: Sequence[str]) -> list[list[float]]:
    """Returns the numbers of each layer, NaN for None."""
    rows: list[Any] = list(_array(values)) if is_array(values) else list(values)
    if len(rows) != len(layers):
        raise ValueError(
            f"{label} has the wrong number of rows: got {len(rows)}, expected {len(layers)}, one "
            "for each layer"
        )
    found = []
    for layer, row in zip(layers, rows, strict=True):
        try:
            inner = _array(row).tolist() if is_array(row) else list(row)
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
        found.append(numbers)
    return found


def _array(values: Any) -> np.ndarray:
    array = to_raw(values).numpy()
    return array.astype(np.float64)


def _scale(numbers: Sequence[float], limits: tuple[float, float] | None) -> Scale:
    """Returns the linear scale for these numbers."""
    if limits is not None:
        low, high = map(float, limits)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"limits is invalid: got {limits}, expected two rising finite numbers")
        if low < 0 < high:  # 0 is in the middle of the two colours
            high = max(-low, high)
            low = -high
        return Scale(low, high, False)
    most = float(f"{max(map(abs, numbers), default=0.0):.6g}") or 1.0
    return Scale(-most if any(x < 0 for x in numbers) else 0.0, most, False)


def _panel(
    title: str, rows: list[list[float]], heads: int, names: Sequence[str], labels: Sequence[Label],
    scale: Scale, panels: int,
) -> Panel:  # fmt: skip
    """Returns the panel of a map. A layer with fewer heads has fewer cells."""
    matrix_LH = np.full((len(rows), heads), math.nan)
    for i, row in enumerate(rows):
        matrix_LH[i, : len(row)] = row
    missing = [(i, j) for i, row in enumerate(rows) for j, x in enumerate(row) if x != x]
    tooltips = [
        [
            f"{name}, head {j}: {'no value' if x != x else f'{x:.4g}'}"
            for j, x in enumerate(matrix_LH[i].tolist())
        ]
        for i, name in enumerate(names)
    ]
    wide, tall = next(((w, h) for n, w, h in _SIDES if panels <= n), _SMALL)
    cell = (_pixels(wide / heads, _CELL[0]), _pixels(tall / len(rows), _CELL[1]))
    numbers = _numbers(matrix_LH)
    widest = max(text_width(text, _NUMBER_SIZE) for row in numbers for text in row)
    fits = widest + 2 <= cell[0] and _NUMBER_SIZE + 2 <= cell[1]
    return Panel(
        title, matrix_LH, Axis("", labels), Axis.of_numbers("head", range(heads)), scale, cell,
        False, missing, tooltips, numbers if fits else (),
    )  # fmt: skip


def _pixels(room: float, most: float) -> float:
    return float(max(1, int(min(room, most))))


def _numbers(matrix_LH: np.ndarray) -> list[list[str]]:
    """Returns the text of each number, all with as many decimals; "" for NaN."""
    found = matrix_LH[np.isfinite(matrix_LH)]
    most = float(np.abs(found).max(initial=0))
    if (found == np.round(found)).all() or not most:
        decimals = 0
    else:
        exponent = math.floor(math.log10(most))
        decimals = max(0, 2 - exponent) if most >= 1 else 1 - exponent
    return [
        ["" if x != x else f"{x + 0.0:.{decimals}f}".replace("-", "−") for x in row]
        for row in matrix_LH.tolist()
    ]


def _layer_labels(names: Sequence[str]) -> tuple[Label, ...]:
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
    texts = [visible(".".join(k)) for k in kept]
    return tuple(
        Label(shorten(text, _NAME_COLUMNS), visible(name))
        for text, name in zip(texts, names, strict=True)
    )
