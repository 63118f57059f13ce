"""The error of one output against another, accumulated in float64."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from qkv.tensors import RawTensor
from qkv.wire.responses import OutputError

__all__ = ["measure_output_error", "output_error_of"]

_BLOCK: Final = 1 << 20  # elements of a block


def measure_output_error(output: RawTensor, reference: RawTensor) -> OutputError:
    """Compares two outputs with the same number of elements.

    Returns:
        The error. A value is None if it is undefined: an output is not finite, or both are zero.
    """
    b, a = (x.numpy().reshape(-1) for x in (output, reference))
    most = max(_largest(b), _largest(a))
    if not math.isfinite(most):
        return OutputError(None, None, None)
    # a power of two keeps squares from overflow and underflow, and rounds no number
    scale = 2.0 ** -max(-1000, min(int(np.frexp(most)[1]), 1000))
    error_sum = a_sum = b_sum = dot_sum = largest = 0.0
    for first in range(0, len(a), _BLOCK):
        x, y = (z[first : first + _BLOCK].astype(np.float64) * scale for z in (b, a))
        error = x - y
        error_sum, a_sum, b_sum, dot_sum = (
            error_sum + _dot(error, error),
            a_sum + _dot(y, y),
            b_sum + _dot(x, x),
            dot_sum + _dot(x, y),
        )
        largest = max(largest, float(np.abs(error).max()))
    return output_error_of(error_sum, a_sum, b_sum, dot_sum, largest / scale)


def output_error_of(
    error_sum: float, a_sum: float, b_sum: float, dot_sum: float, largest: float
) -> OutputError:
    """Returns the error for sums over the elements of an output b and a reference a.

    Args:
        error_sum, a_sum, b_sum: of the squares of b - a, a and b, all multiplied by one factor.
        dot_sum: of the products of a and b, multiplied by the same factor.
        largest: the largest absolute difference.
    """
    return OutputError(
        _ratio(math.sqrt(error_sum), math.sqrt(a_sum)),
        _finite(largest),
        _ratio(dot_sum, math.sqrt(a_sum) * math.sqrt(b_sum), limit=1.0),
    )


def _dot(x: np.ndarray, y: np.ndarray) -> float:
    # BLAS starts threads for more than 10,000 elements, which takes 8 ms on two cores
    return float(np.einsum("i,i->", x, y))


def _largest(array: np.ndarray) -> float:
    """Returns the largest absolute value; NaN or infinite if an element is."""
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        return max(
            float(np.abs(array[first : first + _BLOCK].astype(np.float64)).max())
            for first in range(0, len(array), _BLOCK)
        )


def _ratio(above: float, below: float, limit: float = math.inf) -> float | None:
    return _finite(max(-limit, min(above / below, limit))) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
