"""The error of each head of an output against another output, accumulated in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from qkv.jobs.measure.output_error import output_error_of
from qkv.tensors import RawTensor
from qkv.wire.responses import OutputError

__all__ = ["measure_head_errors"]

_BLOCK: Final = 1 << 20  # elements of a block
_UNDEFINED: Final = OutputError(None, None, None)

Axes = tuple[int, int, int]


def measure_head_errors(
    output: RawTensor, reference: RawTensor, axes: Axes
) -> tuple[OutputError, ...]:
    """Compares each head of two outputs, as `measure_output_error` compares whole outputs.

    Args:
        output, reference: of the same number of elements.
        axes: the number of elements before the axis of the heads, in it, and after it.

    Returns:
        The errors in the order of the heads.
    """
    b, a = (x.numpy().reshape(axes) for x in (output, reference))
    most_H = np.maximum(_largest(b, axes), _largest(a, axes))
    is_finite_H = np.isfinite(most_H)
    # a power of two keeps squares from overflow and underflow, and rounds no number
    exponent_H = np.frexp(np.where(is_finite_H, most_H, 0.0))[1]
    scale_H = np.ldexp(1.0, -np.clip(exponent_H, -1000, 1000))
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
    sums = zip(*(z.tolist() for z in (error_H, a_H, b_H, dot_H, largest_H / scale_H)), strict=True)
    return tuple(
        output_error_of(*own) if is_finite else _UNDEFINED
        for is_finite, own in zip(is_finite_H.tolist(), sums, strict=True)
    )


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # without the threads of BLAS: see `output_error`
    sums_H: np.ndarray = np.einsum("bhi,bhi->h", x, y)
    return sums_H


def _largest(array: np.ndarray, axes: Axes) -> np.ndarray:
    """Returns the largest absolute value of each head; NaN or infinite if an element is."""
    largest_H = np.zeros(axes[1])
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        for block in _blocks(axes):
            found_H = np.abs(array[block].astype(np.float64)).max((0, 2))
            np.maximum(largest_H, found_H, out=largest_H)
    return largest_H


def _blocks(axes: Axes) -> Iterator[tuple[slice, slice, slice]]:
    """Yields the parts of an array, each with all heads."""
    before, heads, after = axes
    columns = min(after, max(1, _BLOCK // heads))
    rows = max(1, _BLOCK // (heads * columns))
    for row in range(0, before, rows):
        for column in range(0, after, columns):
            yield slice(row, row + rows), slice(None), slice(column, column + columns)
