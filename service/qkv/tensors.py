"""`RawTensor`: dtype, shape and bytes, shared by wire formats, jobs and client. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from qkv.errors import InvalidContent

DTYPES: Final[dict[str, np.dtype]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
"""Every supported dtype, with its numpy dtype (little-endian; bfloat16 from ml_dtypes)."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

FLOATING: Final = ("float64", "float32", "float16", "bfloat16")
"""The dtypes in which attention is computed."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a dense tensor. Python integers do not overflow, whatever the shape."""
    return DTYPES[dtype].itemsize * math.prod(shape)


def are_booleans(data: bytearray | memoryview) -> bool:
    """Returns True if all bytes are 0 or 1, as those of a boolean tensor."""
    return not data or int(np.frombuffer(data, np.uint8).max()) <= 1


def unsupported_dtype(name: str, dtype: object) -> InvalidContent:
    """Returns the error of a tensor with another dtype than those of `DTYPES`."""
    return InvalidContent(
        f"{name} has an unsupported dtype: got {dtype}, expected {', '.join(DTYPES)}"
    )


class RawTensor(NamedTuple):
    """A dense, row-major, little-endian tensor. The codecs check dtype, shape and size.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: sizes, 0 or more.
        data: `nbytes(dtype, shape)` contiguous bytes.
        is_untyped: True if it comes from numbers without a dtype, such as JSON lists. A job may
            cast it to the dtype of its input. `dtype` is float64, int64 or bool.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    is_untyped: bool = False

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.data.nbytes

    @classmethod
    def from_numpy(
        cls, array: np.ndarray, name: str = "the tensor", *, is_untyped: bool = False
    ) -> RawTensor:
        """Wraps an array of a supported dtype; copies it unless it is contiguous and little-endian.

        Args:
            array: of numpy.
            name: its name in the error message.
            is_untyped: as the attribute.

        Raises:
            InvalidContent: the dtype is not supported.
        """
        dtype = _NAMES.get(array.dtype) or _NAMES.get(array.dtype.newbyteorder("<"))
        if dtype is None:
            raise unsupported_dtype(name, array.dtype)
        dense = np.ascontiguousarray(array, DTYPES[dtype]).reshape(-1)
        return cls(dtype, array.shape, dense.view(np.uint8).data, is_untyped)

    def numpy(self) -> np.ndarray:
        """Returns a view as an array, without a copy; read-only if the buffer is."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)
