"""Memory that workers share with the device process: one region for each worker.

A worker allocates blocks of its own region and writes inputs into them. The device process reads
them in place, and writes the outputs into other blocks. No tensor goes through a socket.
"""

from __future__ import annotations

import mmap
import sys
import time
import weakref
from bisect import insort
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from qkv.errors import ServiceUnavailable
from qkv.jobs.buffer_layout import ALIGNMENT

__all__ = ["RETAINED_BYTES", "Block", "SharedMemory", "WorkerRegion"]

RETAINED_BYTES: Final = 64 << 20
"""Bytes at the start of each region whose memory the service keeps once used. Memory beyond them
returns to the system when no block has used it for a while."""

_PADDING_BYTES: Final = 1 << 20  # for the padding between tensors
_PAGE_BYTES: Final = mmap.PAGESIZE
_CHUNK_BYTES: Final = 1 << 20  # returned to the system at once: 0.1 to 0.3 ms
_STEP_S: Final = 1e-3
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

    The first write to a page that has returned to the system costs ten times a later one. So pages
    stay while blocks use them again and again. The region may be that of a worker that has ended:
    at first, any page may be used.

    Only one thread may call the methods. Any thread may release a block.
    """

    def __init__(self, shared_memory: SharedMemory, index: int, size: int) -> None:
        self._shared_memory, self._index = shared_memory, index
        self._holes = [(0, size)]  # offset and bytes; in order, no two adjacent
        self._released: deque[tuple[int, int]] = deque()
        # reference to the view, offset and bytes, by the id of the reference
        self._blocks: dict[int, tuple[weakref.ref[np.ndarray], int, int]] = {}
        self._kept_end = size  # no page beyond it is used
        self._recent_end = self._idle_end = 0  # of blocks of this period, and of the one before

    @property
    def keeps_pages(self) -> bool:
        """True if pages beyond `RETAINED_BYTES` may be used."""
        return self._kept_end > RETAINED_BYTES

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
        end = offset + padded
        self._recent_end, self._kept_end = max(self._recent_end, end), max(self._kept_end, end)
        # weakref.finalize would take four times as long
        reference = weakref.ref(view, self._release)
        self._blocks[id(reference)] = reference, offset, padded
        return Block(offset, view)

    def _release(self, reference: weakref.ref[np.ndarray]) -> None:
        """Releases the block of a view that nothing refers to."""
        _, offset, size = self._blocks.pop(id(reference))
        self._released.append((offset, size))

    def begin_period(self) -> None:
        """Begins a period. Pages beyond all blocks of the one before are idle."""
        blocks = self._blocks.copy().values()  # another thread may release one
        live_end = max((offset + size for _, offset, size in blocks), default=0)
        self._idle_end, self._recent_end = max(self._recent_end, live_end), live_end

    def release_idle_pages(self) -> bool:
        """Returns idle pages to the system for about a millisecond; True if more are left."""
        end = max(self._idle_end, self._recent_end, RETAINED_BYTES)
        stop_at = time.perf_counter() + _STEP_S
        while self._kept_end > end and time.perf_counter() < stop_at:
            start = max(end, self._kept_end - _CHUNK_BYTES)
            self._shared_memory.release_pages(self._index, start, self._kept_end)
            self._kept_end = start
        return self._kept_end > end

    def _add_hole(self, offset: int, size: int) -> None:
        """Adds a hole and merges it with its neighbours."""
        insort(self._holes, (offset, size))
        position = self._holes.index((offset, size))
        for left in (position, position - 1):
            if 0 <= left < len(self._holes) - 1:
                (offset, size), (after, more) = self._holes[left : left + 2]
                if offset + size == after:
                    self._holes[left : left + 2] = [(offset, size + more)]
