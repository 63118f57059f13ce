"""Memory that worker processes share with the one that owns the device: a region for each worker.

A worker takes blocks of its own region and writes requests into them; the device process reads
those where they are, and writes the answers into others. No byte goes through a socket.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from bisect import insort
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from qkv.errors import NotNow

__all__ = ["ALIGNMENT", "KEPT", "Arena", "Block", "Region"]

ALIGNMENT: Final = 64
"""Bytes at whose multiples every block begins."""

KEPT: Final = 64 << 20
"""Bytes at the start of each region that stay with the service once they were used; what lies
beyond goes back to the system with each block."""

_SLACK: Final = 1 << 20  # for what lies between tensors
_PAGE: Final = mmap.PAGESIZE
_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # mman.h; Python names it from 3.13


class Block(NamedTuple):
    """Bytes of a region.

    Attributes:
        first: where in the region they begin.
        bytes: themselves. The block is free again once nothing refers to these, or to views of
            their `data`.
    """

    first: int
    bytes: np.ndarray


class Arena:
    """The regions, made before any process is forked; memory only where something was written.

    Args:
        regions: how many.
        size: bytes that the blocks of each hold together, at least.
    """

    def __init__(self, regions: int, size: int) -> None:
        self._size = -(-(size + _SLACK) // _PAGE) * _PAGE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, regions * self._size, flags=flags)

    def region(self, index: int) -> Region:
        """A worker's region, of which nothing is taken."""
        return Region(self, index, self._size)

    def bytes(self, index: int, first: int, size: int) -> np.ndarray:
        """Bytes of a region; whoever took them sees what is written to them, and the reverse."""
        assert 0 <= first <= first + size <= self._size
        start = index * self._size + first
        return np.frombuffer(memoryview(self._memory)[start : start + size], np.uint8)

    def give_back(self, index: int, first: int, size: int) -> None:
        """Has the system take the whole pages of these bytes that need not be kept."""
        start = -(-max(first, KEPT) // _PAGE) * _PAGE
        end = (first + size) // _PAGE * _PAGE
        if start < end and sys.platform == "linux":
            self._memory.madvise(mmap.MADV_REMOVE, index * self._size + start, end - start)


class Region:
    """Takes blocks, first fit: few requests at a time stay where memory is warm.

    `take` is for one thread. Blocks may come back in any.
    """

    def __init__(self, arena: Arena, index: int, size: int) -> None:
        self._arena, self._index = arena, index
        self._holes = [(0, size)]  # where they begin, and bytes; in order, none beside another
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> Block:
        """A block of so many bytes.

        Raises:
            NotNow: there is no room, until others come back.
        """
        while self._returned:
            self._close(*self._returned.popleft())
        whole = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        place = next((p for p, (_, room) in enumerate(self._holes) if room >= whole), None)
        if place is None:
            raise NotNow("requests and answers on their way fill the memory that is for them")
        first, room = self._holes[place]
        if room == whole:
            del self._holes[place]
        else:
            self._holes[place] = (first + whole, room - whole)
        taken = self._arena.bytes(self._index, first, size)
        weakref.finalize(taken, self._return, first, whole).atexit = False
        return Block(first, taken)

    def _return(self, first: int, size: int) -> None:
        self._arena.give_back(self._index, first, size)
        self._returned.append((first, size))

    def _close(self, first: int, size: int) -> None:
        """Makes a hole, one with those beside it."""
        insort(self._holes, (first, size))
        place = self._holes.index((first, size))
        for left in (place, place - 1):
            if 0 <= left < len(self._holes) - 1:
                (first, size), (after, more) = self._holes[left : left + 2]
                if first + size == after:
                    self._holes[left : left + 2] = [(first, size + more)]
