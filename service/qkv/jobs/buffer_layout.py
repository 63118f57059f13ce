"""The places of the tensors of a job in one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from qkv.tensors import RawTensor, nbytes

ALIGNMENT: Final = 64
"""Alignment of every tensor that a kernel reads, in bytes: the bits of a CPU kernel depend on it.
"""


class _Place(NamedTuple):
    """A tensor's name, dtype and shape, and the slice of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: slice


class BufferLayout:
    """The places of tensors that follow one another.

    Args:
        specs: dtype and shape of each tensor, by name, in order.
        alignment: each tensor begins at a multiple of this many bytes.

    Attributes:
        size: bytes of the buffer.
    """

    def __init__(
        self, specs: Iterable[tuple[str, str, tuple[int, ...]]], alignment: int = ALIGNMENT
    ) -> None:
        self._places: list[_Place] = []
        self.size = 0
        for name, dtype, shape in specs:
            size = nbytes(dtype, shape)
            self._places.append(_Place(name, dtype, shape, slice(self.size, self.size + size)))
            self.size += -(-size // alignment) * alignment

    def write(self, tensors: Mapping[str, RawTensor], buffer: memoryview) -> None:
        """Copies tensors into a buffer of `size` bytes."""
        for name, _, _, where in self._places:
            buffer[where] = tensors[name].data

    def read(self, buffer: memoryview) -> dict[str, RawTensor]:
        """Returns the tensors as views of a buffer of `size` bytes."""
        return {
            name: RawTensor(dtype, shape, buffer[where])
            for name, dtype, shape, where in self._places
        }
