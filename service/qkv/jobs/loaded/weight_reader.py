"""Reads the weights of a layer from a checkpoint into memory that processes share.

The tensors of a layer may be as large as all memory that the service has for layers: a block of
rows is read and copied at a time.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import Array, Weights
from qkv.jobs.buffer_layout import ALIGNMENT
from qkv.wire.checkpoint.checkpoint import Checkpoint

_BLOCK: Final = 16 << 20  # bytes


class WeightMemory:
    """Anonymous memory, shared with the processes that are forked later.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._buffer, self._end = mmap.mmap(-1, max(size, 1)), 0

    def new(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a dense, aligned array of zeros."""
        count = int(np.prod(shape))
        flat = np.frombuffer(self._buffer, dtype, count, self._end)
        self._end += _aligned(flat.nbytes)
        return flat.reshape(shape)

    def copy(self, array: Array) -> Array:
        """Returns a dense, aligned copy of an array."""
        copied = self.new(array.dtype, array.shape)
        np.copyto(copied, array)
        return copied


def size_in_memory(weights: Weights) -> int:
    """Returns the bytes that weights take."""
    return sum(_aligned(array.nbytes) for array in weights.values())


def read_weights(layer: Layer, checkpoint: Checkpoint, memory: WeightMemory) -> dict[str, Array]:
    """Reads the weights of a layer without numbers.

    A layout tells by views of its tensors where each weight is; the views have addresses, and their
    memory is never touched. Some layouts copy the heads of a matrix: that matrix is read whole.

    Raises:
        InvalidContent, OSError: as `Checkpoint.read_into`.
    """
    tensors = {name: np.empty(a.shape, a.dtype) for name, a in layer.tensors.items()}
    views = layer.with_numbers(tensors).weights
    sources = {weight: layer.name_of(weight) for weight in views}
    copied = {
        sources[weight]
        for weight, view in views.items()
        if not _is_slice(view, tensors[sources[weight]])
    }
    if copied:
        del views
        for name in copied:
            checkpoint.read_into(name, 0, _bytes_of(tensors[name]))
        views = layer.with_numbers(tensors).weights
        tensors = {name: tensor for name, tensor in tensors.items() if name not in copied}
    weights, left = {}, dict(views)
    del views  # a copy is freed once it has its place
    for weight, source in sources.items():
        view = left.pop(weight)
        if source in copied:
            weights[weight] = memory.copy(view)
            continue
        weights[weight] = memory.new(view.dtype, view.shape)
        _read_slice(checkpoint, source, tensors[source], view, weights[weight])
    return weights


def _is_slice(view: Array, tensor: Array) -> bool:
    """Returns True for a part of a tensor, or its transpose, with all numbers between its ends."""
    is_dense = tensor.strides in (view.strides, view.T.strides)
    return is_dense and np.may_share_memory(view, tensor)


def _read_slice(
    checkpoint: Checkpoint, name: str, tensor: Array, view: Array, target: Array
) -> None:
    """Reads the part of a tensor that a view of it shows.

    Args:
        checkpoint: has the tensor.
        name: of the tensor.
        tensor: an array of its shape.
        view: rows and columns of `tensor`, or their transpose.
        target: an array of the shape of `view`.
    """
    size, columns = tensor.itemsize, tensor.shape[-1]
    is_transposed = view.strides != tensor.strides or view.shape[-1] > columns
    target_RC = np.atleast_2d(target.T if is_transposed else target)
    first = (view.ctypes.data - tensor.ctypes.data) // size
    # several whole rows, or one row in pieces
    height = max(1, _BLOCK // (columns * size))
    width = min(target_RC.shape[1], max(1, _BLOCK // size))
    for r in range(0, len(target_RC), height):
        for c in range(0, target_RC.shape[1], width):
            part_RC = target_RC[r : r + height, c : c + width]
            rows, used = part_RC.shape
            block = np.empty(rows * columns, tensor.dtype)
            numbers = _bytes_of(block[: (rows - 1) * columns + used])
            checkpoint.read_into(name, (first + r * columns + c) * size, numbers)
            part_RC[:] = block.reshape(rows, columns)[:, :used]


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
