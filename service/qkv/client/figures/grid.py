"""Panels in a grid: matrices with axes and colour scales, before they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from qkv.client.figures.labels import Axis
from qkv.client.figures.scale import Scale

__all__ = ["Grid", "Panel", "cell_size", "grid_columns"]

# (largest number of panels, side of a panel in pixels, largest cell in pixels)
_SIDES: Final = ((1, 560, 30), (4, 340, 26), (16, 250, 24))
_SMALL_SIDE, _SMALL_CELL = 180, 16  # for more panels
_WIDE_CELL: Final = 18  # a panel of few rows is not a line
_LEAST_SIDE: Final = 120


class Panel(NamedTuple):
    """A matrix with its axes.

    Attributes:
        title: the text above it; "": none.
        matrix: (rows, columns), finite, or NaN for no cell.
        rows, columns: the axes.
        scale: of the colours.
        cell: (width, height) of a cell in pixels.
        has_empty_zeros: True if a cell of 0 is not drawn, as masked weights are not.
        missing: (row, column) of cells without a value.
        tooltips: a text for each cell, in rows; (): the number of its shade.
        numbers: a text to draw in each cell, in rows; (): none.
    """

    title: str
    matrix: np.ndarray
    rows: Axis
    columns: Axis
    scale: Scale
    cell: tuple[float, float]
    has_empty_zeros: bool = True
    missing: Sequence[tuple[int, int]] = ()
    tooltips: Sequence[Sequence[str]] = ()
    numbers: Sequence[Sequence[str]] = ()

    @property
    def shades(self) -> list[list[int | None]]:
        """The shade of each cell; None: no cell."""
        return [
            [
                None if x != x or (x == 0 and self.has_empty_zeros) else self.scale.shade(x)
                for x in row
            ]
            for row in self.matrix.tolist()
        ]

    @property
    def width(self) -> float:
        """Pixels."""
        return len(self.columns.labels) * self.cell[0]

    @property
    def height(self) -> float:
        """Pixels."""
        return len(self.rows.labels) * self.cell[1]


class Grid(NamedTuple):
    """Panels in rows, with one legend or one for each panel.

    Attributes:
        title: above the panels; "": none.
        caption: sentences below the panels, and for screen readers.
        panels: at least one.
        columns: panels in a row.
        value_name: the name of the numbers, beside the legend; "": none.
        shared_scale: True if all panels have one scale and thus one legend.
        fallback_title: the title for screen readers if `title` is "".
    """

    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int
    value_name: str
    shared_scale: bool
    fallback_title: str


def cell_size(rows: int, columns: int, panels: int) -> tuple[float, float]:
    """Returns width and height of a cell: square, except in a panel of few rows or columns."""
    side, most = next(
        ((side, cell) for count, side, cell in _SIDES if panels <= count),
        (_SMALL_SIDE, _SMALL_CELL),
    )
    square = min(most, side / max(rows, columns))
    width, height = (max(square, min(_WIDE_CELL, _LEAST_SIDE / n)) for n in (columns, rows))
    return _even(width), _even(height)


def _even(pixels: float) -> float:
    """Returns whole pixels, so that all cells are drawn equally large; small cells stay exact."""
    return float(int(pixels)) if pixels >= 4 else pixels


def grid_columns(panels: int) -> int:
    """Returns the number of panels in a row."""
    if panels <= 3:
        return panels
    if panels <= 16:
        return 2 if panels == 4 else 3 if panels in (5, 6, 9) else 4
    return 8 if panels % 8 == 0 else 6
