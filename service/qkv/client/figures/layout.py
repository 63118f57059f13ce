"""Lays out a grid of panels: the places of cells, labels, legends and the caption."""

from __future__ import annotations

import math
from collections.abc import Iterator
from textwrap import wrap
from typing import Final, NamedTuple

from qkv.client.figures.grid import Grid, Panel
from qkv.client.figures.labels import Axis, text_width
from qkv.client.figures.legends import (
    legend_height,
    legend_width,
    panel_legend,
    panel_legend_width,
    shared_legend,
)
from qkv.client.figures.scene import Anchor, Cells, Frame, Scene, Shape, Slashes, Text

__all__ = ["lay_out"]

# pixels
_MARGIN: Final = 18
_TITLE: Final = 16
_NAME: Final = 12
_LABEL: Final = 10
_CAPTION: Final = 10.5
_GAP: Final = 20  # between panels
_HEADER: Final = 20  # above a panel
_CAPTION_LINE: Final = 15
_TITLE_LINE: Final = 22
_LONG_TITLE: Final = 480  # a longer title does not widen the figure
_BOLD: Final = 1.1  # width of bold letters by that of others
_LEGEND_GAP: Final = 22
_LEAST_WIDTH: Final = 300
_MIDDLE: Final = 0.35  # from the middle of a letter to its base line, by the size of the font
_STEEP, _SLANTED = 90, 60  # degrees


class _Places(NamedTuple):
    """The places of the panels.

    Attributes:
        lefts: left edges of the columns of the grid.
        tops: upper edges of its rows.
        right: right edge of the panels.
        end: lower edge of the last row of panels.
        bottom: lower edge of all labels.
    """

    lefts: list[float]
    tops: list[float]
    right: float
    end: float
    bottom: float


def lay_out(grid: Grid) -> Scene:
    """Returns the figure of a grid."""
    width = max(_place(grid, 0).right + _legend_room(grid), _LEAST_WIDTH)
    width = max(width, _MARGIN + min(text_width(grid.title, _TITLE * _BOLD), _LONG_TITLE))
    letters = int((width - _MARGIN) / text_width("n", _TITLE * _BOLD))
    title_lines = wrap(grid.title, letters)
    places = _place(grid, len(title_lines))
    shapes: list[Shape] = [
        Text(_MARGIN, _MARGIN + 12 + n * _TITLE_LINE, line, _TITLE, is_strong=True, is_bold=True)
        for n, line in enumerate(title_lines)
    ]
    for n in range(len(grid.panels)):
        row, column = divmod(n, grid.columns)
        shapes += _panel(grid, n, places.lefts[column], places.tops[row])
    bottom = places.bottom
    if grid.shared_scale:
        top = places.tops[0]
        has_missing, height = _has_missing(grid), _legend_height(grid, places)
        scale = grid.panels[0].scale
        shapes += shared_legend(
            scale, places.right + _LEGEND_GAP, top, height, grid.value_name, has_missing
        )
        bottom = max(bottom, top + height + 26 * has_missing)
    for line in wrap(grid.caption, int((width - _MARGIN) / text_width("n", _CAPTION))):
        bottom += _CAPTION_LINE
        shapes.append(Text(_MARGIN, bottom + 8, line, _CAPTION))
    return Scene(
        math.ceil(width + _MARGIN),
        math.ceil(bottom + _MARGIN),
        grid.title or grid.fallback_title,
        grid.caption,
        shapes,
    )


def _legend_height(grid: Grid, places: _Places) -> float:
    return legend_height(places.end - places.tops[0], grid.value_name)


def _legend_room(grid: Grid) -> float:
    """Returns the pixels right of the panels for the legend."""
    if not grid.shared_scale:
        return 0.0
    height = _legend_height(grid, _place(grid, 0))
    scale, has_missing = grid.panels[0].scale, _has_missing(grid)
    return _LEGEND_GAP + legend_width(scale, height, grid.value_name, has_missing)


def _has_missing(grid: Grid) -> bool:
    return any(panel.missing for panel in grid.panels)


def _place(grid: Grid, title_lines: int) -> _Places:
    """Returns the places of the panels, with room for the labels that each of them has."""
    lefts: list[float] = []
    x = float(_MARGIN)
    for column in range(grid.columns):
        members = range(column, len(grid.panels), grid.columns)
        x += max(_left_room(grid, n) for n in members)
        lefts.append(x)
        x += max(_slot_width(grid, grid.panels[n]) for n in members) + _GAP
    tops: list[float] = []
    y = float(_MARGIN + (title_lines * _TITLE_LINE + 4 if title_lines else 0))
    has_header = not grid.shared_scale or any(panel.title for panel in grid.panels)
    end = lowest = y
    for first in range(0, len(grid.panels), grid.columns):
        members = range(first, min(first + grid.columns, len(grid.panels)))
        tops.append(y + _HEADER * has_header)
        end = tops[-1] + max(grid.panels[n].height for n in members)
        # the labels of a panel without one below it may use the free place
        lowest = max(
            lowest, *(tops[-1] + grid.panels[n].height + _bottom_room(grid, n) for n in members)
        )
        inner = [_bottom_room(grid, n) for n in members if n + grid.columns < len(grid.panels)]
        y = end + max(inner, default=0) + _GAP - 4
    return _Places(lefts, tops, x - _GAP, end, lowest)


def _slot_width(grid: Grid, panel: Panel) -> float:
    """Returns the width of a panel, or of its title and legend if they are wider."""
    title = text_width(panel.title, _NAME)
    if not grid.shared_scale:
        title += 12 + panel_legend_width(panel.scale)
    return max(panel.width, title)


def _has_row_labels(grid: Grid, n: int) -> bool:
    """True if the panel is the first in its row, or has other rows than the one before it."""
    return n % grid.columns == 0 or grid.panels[n - 1].rows != grid.panels[n].rows


def _has_column_labels(grid: Grid, n: int) -> bool:
    """True if no panel below has the same columns, or if a panel beside it has labels anyway."""
    first = n - n % grid.columns
    beside = range(first, min(first + grid.columns, len(grid.panels)))
    return n + grid.columns >= len(grid.panels) or any(
        grid.panels[other + grid.columns].columns != grid.panels[other].columns
        for other in beside
        if other + grid.columns < len(grid.panels)
    )


def _left_room(grid: Grid, n: int) -> float:
    """Returns the pixels left of a panel for its labels and for those of the first column."""
    panel, room = grid.panels[n], 0.0
    if _has_row_labels(grid, n):
        room = _row_labels_width(panel) + (20 if panel.rows.name else 0)
    if _has_column_labels(grid, n) and n % grid.columns == 0 and _angle(panel) == _SLANTED:
        slant = math.cos(math.radians(_SLANTED))
        widest = max(
            text_width(label.text, _LABEL) * slant - j * panel.cell[0]
            for j, label in enumerate(panel.columns.labels)
        )
        room = max(room, widest)
    return room


def _bottom_room(grid: Grid, n: int) -> float:
    """Returns the pixels below a panel for its labels and the name of its axis."""
    if not _has_column_labels(grid, n):
        return 0.0
    panel = grid.panels[n]
    return _column_labels_height(panel) + (18 if panel.columns.name else 0)


def _row_labels_width(panel: Panel) -> float:
    shown = panel.rows.shown(panel.cell[1], _LABEL + 1)
    return max(text_width(panel.rows.labels[i].text, _LABEL) for i in shown) + 7


def _angle(panel: Panel) -> int:
    """Returns the angle of the column labels: level if all fit, steep if columns are narrow."""
    if panel.columns.are_numbers:
        return 0  # they are thinned until they fit
    widest = max(text_width(label.text, _LABEL) for label in panel.columns.labels)
    if widest + 5 <= panel.cell[0]:
        return 0
    return _SLANTED if panel.cell[0] >= 14 else _STEEP


def _shown_columns(panel: Panel) -> range:
    """Returns the indices of the columns whose labels fit."""
    axis, size = panel.columns, float(_LABEL + 1)
    if axis.are_numbers:
        size = max(text_width(label.text, _LABEL) for label in axis.labels) + 6
    return axis.shown(panel.cell[0], size)


def _column_labels_height(panel: Panel) -> float:
    angle = math.radians(_angle(panel))
    widest = max(text_width(panel.columns.labels[j].text, _LABEL) for j in _shown_columns(panel))
    return widest * math.sin(angle) + _LABEL * math.cos(angle) + 7


def _panel(grid: Grid, n: int, x: float, y: float) -> Iterator[Shape]:
    """Yields the shapes of a panel."""
    panel, shades = grid.panels[n], grid.panels[n].shades
    if panel.title:
        yield Text(x, y - 7, panel.title, _NAME, is_strong=True)
    if not grid.shared_scale:
        right = x + _slot_width(grid, panel)
        yield from panel_legend(panel.scale, right, y - 7)
    shown = {shade for row in shades for shade in row if shade is not None}
    tooltips = {shade: f"{panel.scale.number(shade):.3g}" for shade in shown}
    if panel.tooltips:
        yield Cells(x, y, *panel.cell, shades, cell_tooltips=panel.tooltips)
    else:
        yield Cells(x, y, *panel.cell, shades, tooltips)
    if panel.missing:
        texts = [panel.tooltips[i][j] for i, j in panel.missing]
        yield Slashes(x, y, *panel.cell, panel.missing, texts)
    yield Frame(x, y, panel.width, panel.height)
    if panel.numbers:
        yield from _numbers(panel, shades, x, y)
    if _has_row_labels(grid, n):
        yield from _row_labels(panel, x, y)
    if _has_column_labels(grid, n):
        yield from _column_labels(panel, x, y)


def _numbers(panel: Panel, shades: list[list[int | None]], x: float, y: float) -> Iterator[Text]:
    """Yields the number in each cell."""
    width, height = panel.cell
    for i, (row, texts) in enumerate(zip(shades, panel.numbers, strict=True)):
        for j, (shade, text) in enumerate(zip(row, texts, strict=True)):
            if shade is not None:
                middle = y + (i + 0.5) * height + _MIDDLE * _LABEL
                yield Text(x + (j + 0.5) * width, middle, text, _LABEL, "middle", on_shade=shade)


def _row_labels(panel: Panel, x: float, y: float) -> Iterator[Text]:
    """Yields the labels left of a panel, and the name of their axis."""
    axis, pitch = panel.rows, panel.cell[1]
    for i in axis.shown(pitch, _LABEL + 1):
        at = y + (i + 0.5) * pitch + _MIDDLE * _LABEL
        yield _label(axis, i, x - 5, at, "end", 0)
    if axis.name:
        left = x - _row_labels_width(panel) - 6
        yield Text(left, y + panel.height / 2, axis.name, _NAME, "middle", 90)


def _column_labels(panel: Panel, x: float, y: float) -> Iterator[Text]:
    """Yields the labels below a panel, and the name of their axis."""
    axis, pitch, angle = panel.columns, panel.cell[0], _angle(panel)
    bottom = y + panel.height
    for j in _shown_columns(panel):
        middle = x + (j + 0.5) * pitch
        if angle:
            yield _label(axis, j, middle + _MIDDLE * _LABEL, bottom + 6, "end", angle)
        else:
            yield _label(axis, j, middle, bottom + _LABEL + 4, "middle", 0)
    if axis.name:
        below = bottom + _column_labels_height(panel) + 12
        yield Text(x + panel.width / 2, below, axis.name, _NAME, "middle")


def _label(axis: Axis, n: int, x: float, y: float, anchor: Anchor, angle: int) -> Text:
    text, whole = axis.labels[n]
    tooltip = whole if whole != text else ""
    return Text(x, y, text, _LABEL, anchor, angle, is_token=True, tooltip=tooltip)
