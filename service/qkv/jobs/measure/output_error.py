"""Errors of one output against another, accumulated in float64."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from qkv.tensors import RawTensor

__all__ = ["OutputError"]

_BLOCK: Final = 1 << 20  # elements of a block


class OutputError(NamedTuple):
    """The error of an output against a reference.

    A value is None if it is undefined: an output is not finite, or both are zero.

    Attributes:
        relative_error: the Frobenius norm of the difference over that of the reference.
        largest_error: the largest absolute difference.
        cosine: the cosine of the angle between the two.
    """

    relative_error: float | None
    largest_error: float | None
    cosine: float | None

    @classmethod
    def measure(cls, output: RawTensor, reference: RawTensor) -> OutputError:
        """Compares two outputs with the same number of elements."""
        b, a = (x.numpy().reshape(-1) for x in (output, reference))
        most = max(_largest(b), _largest(a))
        if not math.isfinite(most):
            return cls(None, None, None)
        # a power of two: squares neither overflow nor vanish, and no number is rounded
        scale = 2.0 ** -max(-1000, min(int(np.frexp(most)[1]), 1000))
        squared = of_a = of_b = both = largest = 0.0
        for first in range(0, len(a), _BLOCK):
            x, y = (z[first : first + _BLOCK].astype(np.float64) * scale for z in (b, a))
            off = x - y
            squared, of_a, of_b = (
                squared + float(off @ off),
                of_a + float(y @ y),
                of_b + float(x @ x),
            )
            both, largest = both + float(x @ y), max(largest, float(np.abs(off).max()))
        return cls(
            _ratio(math.sqrt(squared), math.sqrt(of_a)),
            _finite(largest / scale),
            _ratio(both, math.sqrt(of_a) * math.sqrt(of_b), limit=1.0),
        )


def _largest(array: np.ndarray) -> float:
    """Returns the largest size; NaN or infinite if an element is."""
    with np.errstate(invalid="ignore"):  # NaN, which bfloat16 warns of
        return max(
            float(np.abs(array[first : first + _BLOCK].astype(np.float64)).max())
            for first in range(0, len(array), _BLOCK)
        )


def _ratio(above: float, below: float, limit: float = math.inf) -> float | None:
    return _finite(max(-limit, min(above / below, limit))) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
