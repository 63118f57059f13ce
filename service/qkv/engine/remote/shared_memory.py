"""Memory that workers share with the device process: one region for each worker.

A worker allocates blocks of its own region and writes inputs into them. The device process reads
them in place, and writes the outputs into other blocks. No tensor goes through a socket.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from bisect import insort
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from qkv.errors import ServiceUnavailable
from qkv.jobs.buffer_layout import ALIGNMENT

RETAINED_BYTES: Final = 64 << 20
"""Bytes at the start of each region whose memory the service keeps once used. Memory beyond them
returns to the system when the region has been empty for a while."""

_PADDING_BYTES: Final = 1 << 20  # for the padding between tensors
_PAGE_BYTES: Final = mmap.PAGESIZE
_RELEASED_BYTES: Final = 16 << 20  # at once: 2 to 6 ms
_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # mman.h; Python names it since 3.13


class Block(NamedTuple):
    """Bytes of a region.

    Attributes:
        offset: offset in the region.
        bytes: view of the bytes. The block is free again once nothing refers to this array, or to
            views of its `data`.
    """

    offset: int
    bytes: np.ndarray


class SharedMemory:
    """The regions of all workers, created before the fork; takes memory only for written pages.

    Args:
        regions: number of regions.
        size: bytes that the blocks of one region can hold together, at least.

    Attributes:
        region_bytes: bytes of one region.
    """

    def __init__(self, regions: int, size: int) -> None:
        self.region_bytes = -(-(size + _PADDING_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, regions * self.region_bytes, flags=flags)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    def region(self, index: int) -> WorkerRegion:
        """Returns a worker's region, with nothing allocated."""
        return WorkerRegion(self, index, self.region_bytes)

    def view(self, index: int, offset: int, size: int) -> np.ndarray:
        """Returns a view of bytes of a region, which the worker and the device process share."""
        assert 0 <= offset <= offset + size <= self.region_bytes
        start = index * self.region_bytes + offset
        return self._bytes[start : start + size]

    def release_pages(self, index: int, start: int, end: int) -> None:
        """Returns the whole pages between two offsets to the system; they are zero afterwards."""
        start, end = -(-start // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
        if start < end and sys.platform == "linux":
            self._memory.madvise(mmap.MADV_REMOVE, index * self.region_bytes + start, end - start)


class WorkerRegion:
    """A worker's region, in blocks by first fit: few requests at a time reuse the same memory.

    The region may be that of a worker that has ended: at first, any page may be used.

    Only one thread may call the methods. Any thread may release a block.
    """

    def __init__(self, shared_memory: SharedMemory, index: int, size: int) -> None:
        self._shared_memory, self._index = shared_memory, index
        self._holes = [(0, size)]  # offset and bytes; in order, no two adjacent
        self._released: deque[tuple[int, int]] = deque()
        # reference to the view, offset and bytes, by the id of the reference
        self._blocks: dict[int, tuple[weakref.ref[np.ndarray], int, int]] = {}
        self._used_end = size  # no page beyond it is used
        self._is_idle = False  # nothing was allocated since `release_idle_pages` was called

    def allocate(self, size: int) -> Block:
        """Allocates a block of `size` bytes.

        Raises:
            ServiceUnavailable: no hole is large enough until other blocks are released.
        """
        while self._released:
            self._add_hole(*self._released.popleft())
        padded = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        position = next((p for p, (_, room) in enumerate(self._holes) if room >= padded), None)
        if position is None:
            raise ServiceUnavailable("the memory for requests and responses is full")
        offset, room = self._holes[position]
        if room == padded:
            del self._holes[position]
        else:
            self._holes[position] = (offset + padded, room - padded)
        view = self._shared_memory.view(self._index, offset, size)
        self._used_end, self._is_idle = max(self._used_end, offset + padded), False
        # weakref.finalize would take four times as long
        reference = weakref.ref(view, self._release)
        self._blocks[id(reference)] = reference, offset, padded
        return Block(offset, view)

    def _release(self, reference: weakref.ref[np.ndarray]) -> None:
        """Releases the block of a view that nothing refers to."""
        _, offset, size = self._blocks.pop(id(reference))
        self._released.append((offset, size))

    def release_idle_pages(self) -> bool:
        """Returns some pages beyond `RETAINED_BYTES` to the system, if no block is in use, and none
        was allocated since the last call; returns True if more are left.

        The first write to such a page costs ten times a later one, so that the large requests of
        one client after the other keep them.
        """
        was_idle, self._is_idle = self._is_idle, True
        if self._blocks or not was_idle or self._used_end <= RETAINED_BYTES:
            return False
        start = max(RETAINED_BYTES, self._used_end - _RELEASED_BYTES)
        self._shared_memory.release_pages(self._index, start, self._used_end)
        self._used_end = start
        return start > RETAINED_BYTES

    def _add_hole(self, offset: int, size: int) -> None:
        """Adds a hole and merges it with its neighbours."""
        insort(self._holes, (offset, size))
        position = self._holes.index((offset, size))
        for left in (position, position - 1):
            if 0 <= left < len(self._holes) - 1:
                (offset, size), (after, more) = self._holes[left : left + 2]
                if offset + size == after:
                    self._holes[left : left + 2] = [(offset, size + more)]
