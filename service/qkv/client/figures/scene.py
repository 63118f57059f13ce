"""The shapes of a figure, in pixels from the top left. `svg` and `plot` draw the same shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Anchor", "Cells", "Frame", "Scene", "Shape", "Slashes", "Text", "runs_by_shade"]

Anchor: TypeAlias = Literal["start", "middle", "end"]


class Text(NamedTuple):
    """A line of text.

    Attributes:
        x, y: of the anchor, on the base line.
        text: without control characters.
        size: of the font, in pixels.
        anchor: the part of the text that is at `x`.
        angle: degrees, counter-clockwise around the anchor.
        is_strong: True for a name, False for a label in grey.
        is_bold: True for bold type.
        is_token: True for a fixed width, as tokens have.
        on_shade: the shade behind the text, which decides between dark and light text.
        tooltip: the whole text of a shortened label; "": none.
    """

    x: float
    y: float
    text: str
    size: float
    anchor: Anchor = "start"
    angle: int = 0
    is_strong: bool = False
    is_bold: bool = False
    is_token: bool = False
    on_shade: int | None = None
    tooltip: str = ""


class Cells(NamedTuple):
    """A matrix of coloured cells.

    Attributes:
        x, y: of the first cell.
        width, height: of a cell.
        shades: rows of shades; None: no cell.
        tooltips: a text for each shade; {}: none.
        cell_tooltips: a text for each cell instead; (): none.
    """

    x: float
    y: float
    width: float
    height: float
    shades: Sequence[Sequence[int | None]]
    tooltips: Mapping[int, str] = {}
    cell_tooltips: Sequence[Sequence[str]] = ()


class Slashes(NamedTuple):
    """Cells without a value, each with a diagonal line.

    Attributes:
        x, y: of the first cell of the matrix.
        width, height: of a cell.
        cells: (row, column) of each.
        tooltips: a text for each.
    """

    x: float
    y: float
    width: float
    height: float
    cells: Sequence[tuple[int, int]]
    tooltips: Sequence[str]


class Frame(NamedTuple):
    """A thin rectangle around a panel or a legend."""

    x: float
    y: float
    width: float
    height: float


Shape: TypeAlias = Text | Cells | Slashes | Frame


class Scene(NamedTuple):
    """All shapes of a figure, in the order of drawing.

    Attributes:
        width, height: of the figure.
        title: for screen readers and the properties of a file.
        description: for screen readers.
        shapes: of the figure.
    """

    width: int
    height: int
    title: str
    description: str
    shapes: Sequence[Shape]


def runs_by_shade(
    shades: Sequence[Sequence[int | None]],
) -> dict[int, list[tuple[int, int, int]]]:
    """Returns the runs of equal cells of each shade: (row, first column, number of columns)."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for i, row in enumerate(shades):
        j = 0
        for shade, run in groupby(row):
            size = len(list(run))
            if shade is not None:
                found.setdefault(shade, []).append((i, j, size))
            j += size
    return dict(sorted(found.items()))
