"""The colours of numbers: a norm of matplotlib and a colour map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Self

import matplotlib as mpl
import numpy as np
from matplotlib.colors import FuncNorm, Normalize

_DIVERGING: Final = "RdBu"  # red below 0, blue above: no colour blindness confuses them


class Scale(NamedTuple):
    """The colours of numbers.

    Attributes:
        norm: of matplotlib; a scale with two signs has 0 in its middle.
        cmap: name of a colour map.
    """

    norm: Normalize
    cmap: str

    @classmethod
    def by_root(cls, matrices: Iterable[np.ndarray]) -> Self:
        """Returns a scale by the square root, which tells small weights from 0."""
        low, high = _limits(matrices)
        return cls(FuncNorm((_root, _square), vmin=low, vmax=high), _cmap(low, high))

    @classmethod
    def linear(
        cls, matrices: Iterable[np.ndarray], limits: tuple[float, float] | None = None
    ) -> Self:
        """Returns a linear scale, with these limits if they are given."""
        low, high = limits or _limits(matrices)
        if low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
        return cls(Normalize(low, high), _cmap(low, high))


def _limits(matrices: Iterable[np.ndarray]) -> tuple[float, float]:
    """Returns 0 and the largest number, or the same size on both sides of 0."""
    numbers = np.concatenate([np.ma.masked_invalid(matrix).compressed() for matrix in matrices])
    largest = float(np.abs(numbers).max(initial=0.0)) or 1.0
    return -largest if (numbers < 0).any() else 0.0, largest


def _cmap(low: float, high: float) -> str:
    return _DIVERGING if low < 0 < high else str(mpl.rcParams["image.cmap"])


def _root(numbers: np.ndarray) -> np.ndarray:
    roots: np.ndarray = np.sign(numbers) * np.sqrt(np.abs(numbers))
    return roots


def _square(numbers: np.ndarray) -> np.ndarray:
    squares: np.ndarray = np.sign(numbers) * np.square(numbers)
    return squares
