"""How close one output is to another, accumulated in float64."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from qkv.tensors import RawTensor

__all__ = ["Closeness"]

_BLOCK: Final = 1 << 20  # numbers that are looked at together


class Closeness(NamedTuple):
    """How close an output is to one that is held for right; None where a figure has no meaning:
    where either is not finite, or both are zero.

    Attributes:
        relative_error: the Frobenius norm of the difference over that of the right one.
        largest_error: the largest absolute difference.
        cosine: of the angle between the two.
    """

    relative_error: float | None
    largest_error: float | None
    cosine: float | None

    @classmethod
    def of(cls, made: RawTensor, right: RawTensor) -> Closeness:
        """Of two outputs of as many numbers."""
        b, a = (x.numpy().reshape(-1) for x in (made, right))
        most = max(_largest(b), _largest(a))
        if not math.isfinite(most):
            return cls(None, None, None)
        # a power of two: squares neither overflow nor vanish, and no number is rounded
        room = 2.0 ** -max(-1000, min(int(np.frexp(most)[1]), 1000))
        apart = of_a = of_b = both = largest = 0.0
        for first in range(0, len(a), _BLOCK):
            x, y = (z[first : first + _BLOCK].astype(np.float64) * room for z in (b, a))
            off = x - y
            apart, of_a, of_b = apart + float(off @ off), of_a + float(y @ y), of_b + float(x @ x)
            both, largest = both + float(x @ y), max(largest, float(np.abs(off).max()))
        return cls(
            _ratio(math.sqrt(apart), math.sqrt(of_a)),
            _finite(largest / room),
            _ratio(both, math.sqrt(of_a) * math.sqrt(of_b), most=1.0),
        )


def _largest(array: np.ndarray) -> float:
    """NaN or infinite where a number is."""
    with np.errstate(invalid="ignore"):  # NaN, which bfloat16 warns of
        return max(
            float(np.abs(array[first : first + _BLOCK].astype(np.float64)).max())
            for first in range(0, len(array), _BLOCK)
        )


def _ratio(above: float, below: float, most: float = math.inf) -> float | None:
    return _finite(max(-most, min(above / below, most))) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
