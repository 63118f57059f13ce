"""Linformer by its definition: random projections, and calls with checked dtypes."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qkv.attention.variants import linformer
from support.dtypes import exact_dtype

ALL: Final = frozenset({"output", "weights", "map"})
OUTPUT: Final = frozenset({"output"})


def attend_checked(*tensors: Any, **parameters: Any) -> linformer.Linformer:
    """Returns all outputs, with checked dtypes."""
    found = linformer.attend(linformer.Call(*tensors, **parameters), ALL)
    dtype = tensors[0].dtype
    for tensor, expected in zip(found, (dtype, *2 * [exact_dtype(dtype)]), strict=False):
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == expected
    return found


def random_projection(stream: int, rank: int, length: int, seed: int) -> Tensor:
    """Returns a random projection by its definition: normal with variance 1/rank, key by key."""
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    numbers = np.random.Generator(bits).standard_normal((length, rank))
    return torch.from_numpy(numbers.T / math.sqrt(rank)).contiguous()
