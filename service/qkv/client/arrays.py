"""Converts arrays of numpy, torch and other libraries to raw tensors, and back.

`request_builders` uses `to_raw` for inputs and `from_raw_like` for outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qkv.errors import InvalidContent, pointer_to
from qkv.tensors import DTYPES, FLOATING, RawTensor
from qkv.wire.casting import cast_untyped

__all__ = ["FromRaw", "from_raw_like", "is_array", "is_list", "list_to_raw", "to_raw"]

FromRaw = Callable[[RawTensor], Any]
"""Converts a raw tensor to an array of the same kind as the inputs."""


def is_array(value: object) -> bool:
    """True if the value is an array of numpy or torch, or converts to one."""
    if isinstance(value, np.generic):  # one number, such as 1 / np.sqrt(8)
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def is_list(value: object) -> bool:
    """True if the value is a list, a tuple or another sequence, which numpy makes an array of."""
    if is_array(value) or isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence)


def list_to_raw(value: Sequence[Any], name: str) -> RawTensor:
    """Returns the array that numpy makes of a list, as numbers without a dtype.

    Args:
        value: nested lists or tuples of numbers or of booleans.
        name: its name in error messages.

    Raises:
        InvalidContent: lists have different lengths, or values are no numbers.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidContent(
            f"{name} is ragged: got {value!r:.60}, expected lists of equal lengths"
        ) from None
    if array.dtype.kind not in "biuf":
        raise InvalidContent(
            f"{name} is invalid: got {value!r:.60}, expected nested lists of numbers, or of "
            "booleans"
        )
    exact = {"b": "bool", "i": "int64"}.get(array.dtype.kind, "float64")  # u: above int64
    return RawTensor.from_numpy(array.astype(DTYPES[exact]), is_untyped=True)


def to_raw(array: Any, name: str = "tensor") -> RawTensor:
    """Returns an array as a raw tensor. Copies it only from another device or if not contiguous.

    Numbers in lists are float32.

    Args:
        array: of numpy, torch or another library, or nested lists.
        name: its name in error messages about lists.

    Raises:
        InvalidContent: requests do not support its dtype.
    """
    if is_list(array):
        raw = list_to_raw(array, name)
        dtypes = (*FLOATING, "bool") if raw.dtype == "bool" else FLOATING
        return cast_untyped(raw, name, dtypes, "float32", pointer_to("tensors", name))
    if not _is_torch(array):
        return RawTensor.from_numpy(_as_numpy(array))
    torch = sys.modules["torch"]
    dense = array.detach().cpu().contiguous()
    if dense.dtype == torch.bfloat16:
        bits = dense.view(torch.int16).numpy()
        return RawTensor("bfloat16", tuple(dense.shape), bits.reshape(-1).view(np.uint8).data)
    return RawTensor.from_numpy(dense.numpy())


def from_raw_like(array: Any) -> FromRaw:
    """Returns a function that converts to torch, on the array's device, or to numpy."""
    if not _is_torch(array):
        return lambda raw: raw.numpy().copy()
    torch, device = sys.modules["torch"], array.device

    def from_raw(raw: RawTensor) -> Any:
        if raw.dtype == "bfloat16":
            bits = np.frombuffer(raw.data, np.int16).reshape(raw.shape).copy()
            return torch.from_numpy(bits).view(torch.bfloat16).to(device)
        return torch.from_numpy(raw.numpy().copy()).to(device)

    return from_raw


def _as_numpy(array: Any) -> np.ndarray:
    if hasattr(array, "__array__"):
        return np.asarray(array)
    return np.from_dlpack(array)


def _is_torch(array: object) -> bool:
    """True if the value is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
