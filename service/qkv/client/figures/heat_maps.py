"""Draws matrices as heat maps in a grid, with labels that fit, and one colour bar or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from qkv.client.figures.scale import Scale
from qkv.client.tokens import count_columns, shorten, visible

_LETTER: Final = 0.62  # width of a letter by the size of its font
_NUMBER: Final = 0.8  # size of a number in a cell by that of the labels
_LINE: Final = 1.25  # height of a line by the size of its font
# inches
_CELL: Final = 0.25
_LEAST_SIDE: Final = 1.6
_PAD: Final = 0.1
_SIDES: Final = ((1, 6.0), (4, 4.2), (9, 3.0), (16, 2.4), (math.inf, 1.8))  # (panels, largest side)
_LONG: Final = 4  # a panel this many times as wide as high, or the reverse, is stretched


class Labels(NamedTuple):
    """The labels of the rows or columns of a panel.

    Attributes:
        name: of the axis, such as "query".
        texts: one for each row or column; (): none; None: they are numbered.
    """

    name: str
    texts: Sequence[str] | None = None

    @property
    def shown(self) -> list[str]:
        """The texts, visible and short."""
        return [shorten(visible(text)) for text in self.texts or ()]

    @property
    def inches(self) -> float:
        """The room for the longest text and the name."""
        return (self.widest * _LETTER * _tick_points() + 30) / 72

    @property
    def widest(self) -> int:
        """The columns of the widest text."""
        return max(map(count_columns, self.shown), default=4)


class Panel(NamedTuple):
    """A matrix and its labels.

    Attributes:
        title: above it; "": none.
        matrix: (rows, columns); cells that are masked or NaN are empty.
        rows, columns: their labels.
        size: (rows, columns) of a larger matrix whose cells were added up; None: that of `matrix`.
        cell: width and height of a cell in inches, if there is room.
        numbers: a text for each cell, in rows, if all of them fit; (): none.
    """

    title: str
    matrix: np.ndarray
    rows: Labels
    columns: Labels
    size: tuple[int, int] | None = None
    cell: tuple[float, float] = (_CELL, _CELL)
    numbers: Sequence[Sequence[str]] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns on the axes."""
        return self.size or (self.matrix.shape[0], self.matrix.shape[1])

    @property
    def is_square(self) -> bool:
        """True if cells are as wide as high."""
        return self.cell[0] == self.cell[1] and max(self.shape) <= _LONG * min(self.shape)

    def inches(self, max_side: float) -> tuple[float, float]:
        """Returns width and height of the panel, at most `max_side`."""
        rows, columns = self.shape
        width, height = min(self.cell[0], max_side / columns), min(self.cell[1], max_side / rows)
        if self.is_square:
            width = height = max(min(width, height), _LEAST_SIDE / max(rows, columns))
            return columns * width, rows * height
        return max(columns * width, _LEAST_SIDE), max(rows * height, _LEAST_SIDE)


def draw_panels(
    panels: Sequence[Panel],
    scales: Sequence[Scale],
    *,
    title: str,
    value_name: str,
    ax: Axes | None = None,
) -> Figure:
    """Returns the figure of some panels.

    Args:
        panels: at least one.
        scales: one for all panels, with one colour bar, or one for each.
        title: above all panels; "": none.
        value_name: beside the colour bar; "": none.
        ax: draws the only panel there; None: a new figure.

    Raises:
        ValueError: `ax` is for one panel, and there are more.
    """
    if ax is None:
        max_side = next(side for limit, side in _SIDES if len(panels) <= limit)
        sizes = [panel.inches(max_side) for panel in panels]
        figure, grid = _new_figure(panels, sizes, has_bars=len(scales) > 1)
        if title:
            figure.suptitle(title, parse_math=False)
    else:
        if len(panels) != 1:
            raise ValueError(f"ax holds one panel: got {len(panels)} panels to draw, expected 1")
        figure, grid = figure_of(ax), [ax]
        panels = [panels[0]._replace(title=title or panels[0].title)]
        box = ax.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        sizes = [(0.8 * box.width, 0.8 * box.height)]  # the colour bar takes the rest
    images = [
        _draw(panel_ax, panel, scales[n % len(scales)], sizes[n])
        for n, (panel_ax, panel) in enumerate(zip(grid, panels, strict=True))
    ]
    if len(scales) == 1:
        figure.colorbar(images[0], ax=grid, label=value_name)
    else:
        for panel_ax, image in zip(grid, images, strict=True):
            figure.colorbar(image, ax=panel_ax, label=value_name)
    return figure


def _new_figure(
    panels: Sequence[Panel], sizes: Sequence[tuple[float, float]], has_bars: bool
) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes for each panel. Inner axes share the labels of the outer ones.

    Args:
        panels: at least one.
        sizes: width and height of each in inches.
        has_bars: True if each panel has its own colour bar.
    """
    count = len(panels)
    columns = _column_count(count)
    rows = math.ceil(count / columns)
    width, height = np.max(sizes, axis=0)
    are_alike = all(p.rows == panels[0].rows and p.columns == panels[0].columns for p in panels)
    room = max(panel.columns.inches for panel in panels)
    figure = Figure(
        figsize=(
            columns * (width + 0.3 + 0.9 * has_bars)
            + max(panel.rows.inches for panel in panels)
            + 1.2,
            rows * (height + 0.5 + room * (not are_alike)) + room * are_alike + 0.6,
        ),
        layout=ConstrainedLayoutEngine(compress=True, w_pad=_PAD, h_pad=_PAD),
    )
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[count:]:
        unused.remove()
    for n, ax in enumerate(grid[:count]):
        if are_alike:
            ax.tick_params(labelleft=n % columns == 0, labelbottom=n + columns >= count)
    return figure, grid[:count]


def _column_count(panels: int) -> int:
    """Returns the number of panels in a row."""
    if panels <= 3:
        return panels
    if panels <= 16:
        return 2 if panels == 4 else 3 if panels in (5, 6, 9) else 4
    return 8 if panels % 8 == 0 else 6


def _tick_points() -> float:
    """Returns the size of the font of tick labels."""
    return float(FontProperties(size=mpl.rcParams["xtick.labelsize"]).get_size_in_points())


def figure_of(ax: Axes) -> Figure:
    """Returns the figure of axes, also of those in a subfigure."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def _draw(ax: Axes, panel: Panel, scale: Scale, size: tuple[float, float]) -> AxesImage:
    """Draws a panel with its labels.

    Args:
        ax: the axes.
        panel, scale: its matrix and colours.
        size: width and height in inches, which decide between labels that fit and others.
    """
    rows, columns = panel.shape
    image = ax.imshow(
        panel.matrix,
        cmap=scale.cmap,
        norm=scale.norm,
        aspect="equal" if panel.is_square else "auto",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    if panel.title:
        ax.set_title(panel.title, parse_math=False)
    width, height = 72 * size[0] / columns, 72 * size[1] / rows  # of a cell in points
    line = _LINE * _tick_points()
    is_turned = (panel.columns.widest + 1) * _LETTER * _tick_points() > width
    step = math.ceil(line / width) if is_turned else 1
    _label(ax.xaxis, panel.columns, range(0, columns, step), 90 if is_turned else 0)
    _label(ax.yaxis, panel.rows, range(0, rows, math.ceil(line / height)), 0)
    if panel.numbers:
        letters = max(len(text) for row in panel.numbers for text in row)
        if letters * _LETTER * _NUMBER * _tick_points() < width and _NUMBER * line < height:
            _write_numbers(ax, image, panel)
    return image


def _write_numbers(ax: Axes, image: AxesImage, panel: Panel) -> None:
    """Writes the number into each cell, in black or white."""
    for (i, j), number in np.ndenumerate(panel.matrix):
        if number == number:
            red, green, blue, _ = image.cmap(image.norm(number))
            is_light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
            ax.text(
                j, i, panel.numbers[i][j], ha="center", va="center",
                color="black" if is_light else "white", size=_NUMBER * _tick_points(),
            )  # fmt: skip


def _label(axis: Axis, labels: Labels, shown: range, rotation: int) -> None:
    """Labels an axis at some rows or columns, or leaves it to the outer axes."""
    parameters = axis.get_tick_params()
    if labels.texts == () or False in (parameters.get("labelleft"), parameters.get("labelbottom")):
        axis.set_ticks([])
        return
    axis.set_label_text(labels.name)
    if labels.texts is None:
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        return
    texts = labels.shown
    axis.set_ticks(shown, [texts[n] for n in shown], rotation=rotation, parse_math=False)
