"""Shared memory of workers and device process."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.remote.shared_memory import (
    RETAINED_BYTES,
    SharedMemory,
    WorkerRegion,
)
from qkv.errors import ServiceUnavailable
from qkv.jobs.buffer_layout import ALIGNMENT


def resident_shared_bytes() -> int:
    """Returns the shared resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.integers(0, 9)), max_size=60))
def test_blocks_never_overlap_and_all_are_released(steps: list[tuple[int, bool, int]]) -> None:
    shared_memory = SharedMemory(2, 1)
    region = shared_memory.region(1)
    blocks: list[Any] = []
    for size, leaves, which in steps:
        if leaves and blocks:
            del blocks[which % len(blocks)]
        block: Any = region.allocate(size)
        assert block.offset % ALIGNMENT == 0
        assert block.bytes.ctypes.data % ALIGNMENT == 0
        block.bytes[:] = len(blocks) % 251
        blocks.append(block)
    spans = sorted((b.offset, b.offset + b.bytes.nbytes) for b in blocks)
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    blocks.clear()
    block = None
    whole = region.allocate(shared_memory.region_bytes)
    assert (whole.offset, whole.bytes.nbytes) == (0, shared_memory.region_bytes)


def test_view_keeps_its_block_allocated() -> None:
    shared_memory = SharedMemory(1, 1 << 20)
    region, size = shared_memory.region(0), shared_memory.region_bytes
    block = region.allocate(size)
    view = block.bytes.data[5:9]
    del block
    with pytest.raises(ServiceUnavailable):
        region.allocate(1)
    view.release()
    del view
    assert region.allocate(size).offset == 0


def test_forked_process_shares_the_memory() -> None:
    shared_memory = SharedMemory(2, 1 << 20)
    block = shared_memory.region(1).allocate(1000)
    pid = os.fork()
    if not pid:
        shared_memory.view(1, block.offset, 1000)[:] = np.arange(1000) % 256
        os._exit(0)
    os.waitpid(pid, 0)
    assert (block.bytes == np.arange(1000) % 256).all()
    assert not shared_memory.view(0, 0, 1 << 20).any()


def release(region: WorkerRegion) -> None:
    """Lets a while pass in which nothing is allocated."""
    region.release_idle_pages()
    while region.release_idle_pages():
        pass


def test_memory_beyond_retained_bytes_returns_to_the_system_when_the_region_is_empty() -> None:
    region = SharedMemory(1, 4 * RETAINED_BYTES).region(0)
    release(region)  # pages of a worker before it
    before = resident_shared_bytes()
    block, small = region.allocate(4 * RETAINED_BYTES), region.allocate(1)
    block.bytes[:] = 1
    assert resident_shared_bytes() - before >= 4 * RETAINED_BYTES
    del block
    release(region)
    assert resident_shared_bytes() - before >= 4 * RETAINED_BYTES
    del small
    release(region)
    assert abs(resident_shared_bytes() - before - RETAINED_BYTES) < 1 << 21


def test_pages_that_requests_use_again_and_again_stay() -> None:
    shared_memory = SharedMemory(1, 4 * RETAINED_BYTES)
    region = shared_memory.region(0)
    for _ in range(3):
        region.allocate(2 * RETAINED_BYTES).bytes[:] = 7
        assert not region.release_idle_pages()
    assert shared_memory.view(0, RETAINED_BYTES, RETAINED_BYTES).all()
    assert region.release_idle_pages()
    region.allocate(4 * RETAINED_BYTES).bytes[:] = 9  # while idle pages return
    assert not region.release_idle_pages()
    assert (shared_memory.view(0, 0, 4 * RETAINED_BYTES) == 9).all()


def test_pages_of_a_worker_that_has_ended_return_to_the_system() -> None:
    shared_memory = SharedMemory(1, 2 * RETAINED_BYTES)
    shared_memory.region(0).allocate(2 * RETAINED_BYTES).bytes[:] = 1
    release(shared_memory.region(0))
    assert not shared_memory.view(0, RETAINED_BYTES, RETAINED_BYTES).any()
