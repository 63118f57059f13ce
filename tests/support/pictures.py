"""Readers of the parts of a figure that people see: labels, titles and colours."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels(figure: Figure) -> list[Axes]:
    """Returns the axes with a matrix, without colour bars."""
    return [ax for ax in figure.axes if ax.images]


def titles(figure: Figure) -> list[str]:
    """Returns the titles of the panels."""
    return [ax.get_title() for ax in panels(figure)]


def row_labels(ax: Axes) -> list[str]:
    """Returns the tick labels of the rows."""
    return [label.get_text() for label in ax.get_yticklabels()]


def column_labels(ax: Axes) -> list[str]:
    """Returns the tick labels of the columns."""
    return [label.get_text() for label in ax.get_xticklabels()]


def matrix(ax: Axes) -> np.ma.MaskedArray:
    """Returns the numbers of a panel; an empty cell is masked."""
    (image,) = ax.images
    array = image.get_array()
    assert isinstance(array, np.ma.MaskedArray)
    return array


def norm(ax: Axes) -> Any:
    """Returns the scale of the colours of a panel."""
    return ax.images[0].norm


def colours(ax: Axes) -> np.ndarray:
    """Returns the colour of each cell (rows, columns, 4), as red, green, blue and opacity."""
    (image,) = ax.images
    found: np.ndarray = np.asarray(image.to_rgba(matrix(ax)))
    return found
