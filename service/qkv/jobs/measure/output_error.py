"""The error of an output against another output, accumulated in float64 for each head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from qkv.tensors import RawTensor
from qkv.wire.responses import OutputError

__all__ = ["ErrorSums", "sum_errors"]

_BLOCK: Final = 1 << 20  # elements of a block
_UNDEFINED: Final = OutputError(relative_error=None, largest_error=None, cosine=None)

Axes = tuple[int, int, int]


class ErrorSums(NamedTuple):
    """Sums over the elements of each head of an output b and of a reference a.

    A power of two scales each head. It keeps squares from overflow and underflow, and rounds no
    number.

    Attributes:
        is_finite_H: True for a head whose elements are finite in a and b.
        exponent_H: of the power of two.
        error_H, a_H, b_H: sums of the squares of b - a, a and b, divided by its square.
        dot_H: sum of the products of a and b, divided by its square.
        largest_H: the largest absolute difference, divided by the power.
    """

    is_finite_H: np.ndarray
    exponent_H: np.ndarray
    error_H: np.ndarray
    a_H: np.ndarray
    b_H: np.ndarray
    dot_H: np.ndarray
    largest_H: np.ndarray

    def heads(self) -> tuple[OutputError, ...]:
        """Returns the error of each head.

        A value is None if it is undefined: an output is not finite, or both are zero.
        """
        return tuple(_output_error(*head) for head in zip(*(x.tolist() for x in self), strict=True))

    def whole(self) -> OutputError:
        """Returns the error of the whole output; a value is None as in `heads`."""
        exponent = self.exponent_H.max()
        shift_H = self.exponent_H - exponent
        with np.errstate(invalid="ignore"):  # in heads that are not finite
            error, a, b, dot = (float(np.ldexp(x, 2 * shift_H).sum()) for x in self[2:6])
            largest = float(np.ldexp(self.largest_H, shift_H).max())
        is_finite = bool(self.is_finite_H.all())
        return _output_error(is_finite, int(exponent), error, a, b, dot, largest)


def sum_errors(output: RawTensor, reference: RawTensor, axes: Axes | None) -> ErrorSums:
    """Compares each head of two outputs.

    Args:
        output, reference: of the same number of elements.
        axes: the number of elements before the axis of the heads, in it, and after it; None: one
            head.
    """
    axes = axes or (1, 1, output.numpy().size)
    b, a = (x.numpy().reshape(axes) for x in (output, reference))
    size_H = np.maximum(_largest(b, axes), _largest(a, axes))
    is_finite_H = np.isfinite(size_H)
    exponent_H = np.frexp(np.where(is_finite_H, size_H, 0.0))[1].clip(-1000, 1000)
    scale_H = np.ldexp(1.0, -exponent_H)
    error_H, a_H, b_H, dot_H, largest_H = np.zeros((5, axes[1]))
    with np.errstate(invalid="ignore", over="ignore"):  # in heads that are not finite
        for block in _blocks(axes):
            x, y = (z[block].astype(np.float64) * scale_H[:, None] for z in (b, a))
            error = x - y
            error_H += _dots(error, error)
            a_H += _dots(y, y)
            b_H += _dots(x, x)
            dot_H += _dots(x, y)
            np.maximum(largest_H, np.abs(error).max((0, 2)), out=largest_H)
    return ErrorSums(is_finite_H, exponent_H, error_H, a_H, b_H, dot_H, largest_H)


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # BLAS starts threads for more than 10,000 elements, which takes 8 ms on two cores
    dots_H: np.ndarray = np.einsum("bhi,bhi->h", x, y)
    return dots_H


def _largest(array: np.ndarray, axes: Axes) -> np.ndarray:
    """Returns the largest absolute value of each head; NaN or infinite if an element is."""
    largest_H = np.zeros(axes[1])
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        for block in _blocks(axes):
            block_H = np.abs(array[block].astype(np.float64)).max((0, 2))
            np.maximum(largest_H, block_H, out=largest_H)
    return largest_H


def _blocks(axes: Axes) -> Iterator[tuple[slice, slice, slice]]:
    """Yields the parts of an array, each with all heads."""
    before, heads, after = axes
    columns = min(after, max(1, _BLOCK // heads))
    rows = max(1, _BLOCK // (heads * columns))
    for row in range(0, before, rows):
        for column in range(0, after, columns):
            yield slice(row, row + rows), slice(None), slice(column, column + columns)


def _output_error(
    is_finite: bool,
    exponent: int,
    error_sum: float,
    a_sum: float,
    b_sum: float,
    dot_sum: float,
    largest: float,
) -> OutputError:
    """Returns the error of one head, or of a whole output, from the fields of `ErrorSums`."""
    if not is_finite:
        return _UNDEFINED
    norm_a, norm_b = math.sqrt(a_sum), math.sqrt(b_sum)
    return OutputError(
        relative_error=_ratio(math.sqrt(error_sum), norm_a),
        largest_error=_finite(largest / 2.0**-exponent),
        cosine=_ratio(dot_sum, norm_a * norm_b, limit=1.0),
    )


def _ratio(above: float, below: float, limit: float = math.inf) -> float | None:
    return _finite(max(-limit, min(above / below, limit))) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
