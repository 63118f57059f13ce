"""Casts untyped numbers, such as JSON lists, to a dtype that their input accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.errors import InvalidContent
from qkv.tensors import DTYPES, FLOATING, RawTensor


def dtype_of(raw: RawTensor, name: str, accepted: Sequence[str], dtype: str, pointer: str) -> str:
    """Returns the accepted dtype in which a tensor is computed.

    Args:
        raw: the tensor.
        name: its name in error messages.
        accepted: the accepted dtypes.
        dtype: the floating dtype for untyped numbers.
        pointer: JSON pointer to the tensor.

    Raises:
        InvalidContent: the dtype is not accepted.
    """
    if not raw.is_untyped:
        candidate, text = raw.dtype, raw.dtype
    elif raw.dtype == "bool":
        candidate, text = "bool", "booleans"
    elif not any(d in accepted for d in FLOATING):
        return "int64"
    elif "bool" in accepted:  # a mask that is added to the scores has their dtype
        return "float64" if dtype == "float64" else "float32"
    else:
        candidate, text = dtype, dtype
    if candidate in accepted:
        return candidate
    expected = "numbers" if text == "booleans" else " or ".join(accepted)
    raise InvalidContent(
        f"{name} has the wrong dtype: got {text}, expected {expected}", pointer=pointer
    )


def cast_untyped(
    raw: RawTensor, name: str, accepted: Sequence[str], dtype: str, pointer: str
) -> RawTensor:
    """Casts an untyped tensor to its `dtype_of`; checks the dtype of any other tensor.

    Args:
        raw, name, accepted, dtype, pointer: as for `dtype_of`.

    Raises:
        InvalidContent: the dtype is not accepted, or the numbers do not fit it.
    """
    if not raw.is_untyped and raw.dtype in accepted:
        return raw  # the same object: the batch key of a tensor without B is its identity
    dtype = dtype_of(raw, name, accepted, dtype, pointer)
    if raw.dtype == dtype and dtype not in FLOATING:
        return raw._replace(is_untyped=False)
    array = raw.numpy()
    if dtype == "int64":
        return RawTensor.from_numpy(_to_int64(array, name, pointer))
    if "bool" in accepted:
        _reject_ambiguous(array, name, pointer)
    with np.errstate(over="ignore"):
        cast = array.astype(DTYPES[dtype])
    is_finite = np.isfinite(cast)
    if not is_finite.all() and not np.array_equal(is_finite, np.isfinite(array)):
        raise InvalidContent(
            f"{name} has numbers outside the range of {dtype}: set another dtype, or write "
            '"Infinity" or "-Infinity" for infinite numbers',
            pointer=pointer,
        )
    return RawTensor.from_numpy(cast)


def _reject_ambiguous(array: np.ndarray, name: str, pointer: str) -> None:
    if array.size and ((array == 0) | (array == 1)).all() and (array == 1).any():
        raise InvalidContent(
            f"{name} is ambiguous: got only the numbers 0 and 1, expected true and false to allow "
            "and forbid, or a tensor with a dtype to add to the scores",
            pointer=pointer,
        )


def _to_int64(array: np.ndarray, name: str, pointer: str) -> np.ndarray:
    if array.dtype != np.int64:
        fits = np.isfinite(array) & (np.abs(array) < 2**53) & (array == np.trunc(array))
        if not fits.all():
            raise InvalidContent(
                f"{name} is invalid: got {array[~fits].flat[0]}, expected integers below 2**53",
                pointer=pointer,
            )
        array = array.astype(np.int64)
    return array
