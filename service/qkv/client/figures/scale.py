"""The colour scale of a panel: the shade of a number, and the number of a shade."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

import numpy as np

from qkv.heatmap import LEVELS, level

__all__ = ["Scale"]

_EPSILON: Final = 1e-6  # moves the borders of shades off simple fractions, as `heatmap.level` does


class Scale(NamedTuple):
    """A colour scale with shades from 0 to LEVELS, or from -LEVELS if the scale is signed.

    Attributes:
        low: the number of the first shade; -high for a signed scale.
        high: the number of the last shade, above `low`.
        is_root: True if the shade grows with the square root of the number; else it is linear.
    """

    low: float
    high: float
    is_root: bool

    @classmethod
    def of_weights(cls, matrices: Iterable[np.ndarray]) -> Self:
        """Returns the scale by the square root for matrices of finite numbers."""
        found = list(matrices)
        most = max((float(np.abs(matrix).max(initial=0)) for matrix in found), default=0)
        signed = any((matrix < 0).any() for matrix in found)
        high = float(f"{most:.6g}") or 1.0  # the last digits differ between processors
        return cls(-high if signed else 0.0, high, True)

    @property
    def is_signed(self) -> bool:
        """True if the scale has two colours, one for each sign."""
        return self.low < 0 < self.high and self.low == -self.high

    @property
    def shades(self) -> range:
        """All shades, in order."""
        return range(-LEVELS if self.is_signed else 0, LEVELS + 1)

    def shade(self, number: float) -> int:
        """Returns the shade of a finite number. Numbers outside the scale get its ends."""
        if self.is_root:
            return level(number, self.high)
        low = 0.0 if self.is_signed else self.low
        share = (number - low) / (self.high - low)
        shade = math.floor(LEVELS * abs(share) + 0.5 + _EPSILON)
        return min(max(shade if share >= 0 else -shade, self.shades[0]), LEVELS)

    def share(self, number: float) -> float:
        """Returns the place of a number on the scale: 0 at its low end, 1 at its high end."""
        if not self.is_root:
            return (number - self.low) / (self.high - self.low)
        root = math.copysign(math.sqrt(abs(number) / self.high), number)
        return (root + 1) / 2 if self.is_signed else root

    def ticks(self, gap: float) -> list[float]:
        """Returns both ends, 0 if it is between them, and round numbers at least `gap` apart.

        Args:
            gap: a share of the scale.
        """
        found = [self.low, self.high] + [0.0] * self.is_signed
        for number in _round_numbers(self.low, self.high, self.is_root):
            if all(abs(self.share(number) - self.share(other)) >= gap for other in found):
                found.append(number)
        return sorted(found)

    def number(self, shade: int) -> float:
        """Returns the number of a shade."""
        share = shade / LEVELS
        if self.is_root:
            return math.copysign(share**2 * self.high, shade)
        low = 0.0 if self.is_signed else self.low
        return low + share * (self.high - low)


def _round_numbers(low: float, high: float, is_root: bool) -> list[float]:
    """Returns round numbers between the ends, the preferred ones first."""
    most = max(abs(low), abs(high))
    if is_root:
        power = math.floor(math.log10(most))
        sizes = [n * 10.0**p for p in range(power, power - 3, -1) for n in (5, 2, 1)]
        return [sign * n for n in sizes if n < most for sign in (1, -1) if low < sign * n]
    rough = (high - low) / 4
    power = math.floor(math.log10(rough))
    step = next(n * 10.0**power for n in (1, 2, 2.5, 5, 10) if n * 10.0**power >= rough * 0.999)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [n * step for n in range(first, last + 1)]
