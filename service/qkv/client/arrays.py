"""Converts arrays of numpy, torch and other libraries to raw tensors, and back.

`request_builders` uses `to_raw` for inputs and `from_raw_like` for outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.tensors import RawTensor

__all__ = ["FromRaw", "from_raw_like", "is_array", "to_raw"]

FromRaw = Callable[[RawTensor], Any]
"""Converts a raw tensor to an array of the same kind as the inputs."""


def is_array(value: object) -> bool:
    """True if the value is an array of numpy or torch, or converts to one."""
    if isinstance(value, np.generic):  # one number, such as 1 / np.sqrt(8)
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def to_raw(array: Any) -> RawTensor:
    """Returns the array as a raw tensor. Copies it only from another device or if not contiguous.

    Raises:
        InvalidContent: requests do not support its dtype.
    """
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
