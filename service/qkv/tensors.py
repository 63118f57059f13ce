"""The raw tensor that wire, job and client speak of: dtype, shape, buffer. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from qkv.errors import InvalidContent

__all__ = ["DTYPES", "FLOATING", "RawTensor", "nbytes"]

DTYPES: Final[dict[str, np.dtype]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
"""Every dtype that travels, with its numpy form (little-endian; bfloat16 from ml_dtypes)."""

FLOATING: Final = ("float64", "float32", "float16", "bfloat16")
"""The dtypes attention is computed in."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Python integers: no overflow whatever the shape claims."""
    return DTYPES[dtype].itemsize * math.prod(shape)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A dense, row-major, little-endian tensor as it travels.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: sizes, none negative.
        data: its bytes, exactly `nbytes(dtype, shape)` of them, contiguous.
        is_untyped: it was written as plain numbers without a dtype (JSON lists), so that whoever
            knows what it is for may still convert it; `dtype` is then float64, int64 or bool.

    Raises:
        InvalidContent: the dtype is unknown, or the bytes are not as many as the shape needs.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    is_untyped: bool = False

    def __post_init__(self) -> None:
        size = self.data.nbytes
        if size and self.dtype in DTYPES and nbytes(self.dtype, self.shape) == size:
            return
        if self.dtype not in DTYPES:
            raise InvalidContent(f"dtype {self.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if nbytes(self.dtype, [size or 1 for size in self.shape]) >= 1 << 63:
            raise InvalidContent(f"shape {list(self.shape)} is past what can be counted")
        if self.data.nbytes != nbytes(self.dtype, self.shape):
            raise InvalidContent(
                f"{self.dtype} of shape {list(self.shape)} takes {nbytes(self.dtype, self.shape)} "
                f"bytes; {self.data.nbytes} came"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.nbytes

    @classmethod
    def from_numpy(cls, array: np.ndarray, *, is_untyped: bool = False) -> RawTensor:
        """Wraps an array of a known dtype; copies only what is not contiguous little-endian."""
        little = array.dtype.newbyteorder("<")
        name = next((n for n, dtype in DTYPES.items() if dtype == little), None)
        if name is None:
            raise InvalidContent(
                f"dtype {array.dtype} does not travel; known are {', '.join(DTYPES)}"
            )
        dense = np.ascontiguousarray(array, DTYPES[name]).reshape(-1)
        return cls(name, array.shape, dense.view(np.uint8).data, is_untyped)

    def numpy(self) -> np.ndarray:
        """A view as an array: no copy, read-only where the buffer is."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)
