"""Shared memory of workers and device process, and frames of their channel."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.remote.channel import Channel
from qkv.engine.remote.messages import MessageType
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


def end_period(region: WorkerRegion) -> None:
    """Ends a period, and returns the idle pages."""
    region.begin_period()
    while region.release_idle_pages():
        pass


def test_idle_memory_beyond_retained_bytes_returns_to_the_system() -> None:
    region = SharedMemory(1, 4 * RETAINED_BYTES).region(0)
    end_period(region)  # pages of a worker before it
    before = resident_shared_bytes()
    block = region.allocate(4 * RETAINED_BYTES)
    block.bytes[:] = 1
    assert resident_shared_bytes() - before >= 4 * RETAINED_BYTES
    del block
    end_period(region)  # they were used in the period that ended
    assert resident_shared_bytes() - before >= 4 * RETAINED_BYTES
    kept = [region.keeps_pages]
    end_period(region)
    kept.append(region.keeps_pages)
    assert kept == [True, False]
    assert abs(resident_shared_bytes() - before - RETAINED_BYTES) < 1 << 21


def test_pages_of_live_and_recent_blocks_stay() -> None:
    shared_memory = SharedMemory(1, 4 * RETAINED_BYTES)
    region = shared_memory.region(0)
    first, live, last = (region.allocate(RETAINED_BYTES) for _ in range(3))
    live.bytes[:] = 7
    last.bytes[:] = 8
    del first, last
    for _ in range(3):
        end_period(region)
    assert (live.bytes == 7).all()
    assert not shared_memory.view(0, 2 * RETAINED_BYTES, RETAINED_BYTES).any()
    region.begin_period()
    new = region.allocate(2 * RETAINED_BYTES)  # while idle pages return
    new.bytes[:] = 9
    while region.release_idle_pages():
        pass
    assert (new.bytes == 9).all()
    assert (live.bytes == 7).all()


def test_pages_of_a_worker_that_has_ended_return_to_the_system() -> None:
    shared_memory = SharedMemory(1, 2 * RETAINED_BYTES)
    shared_memory.region(0).allocate(2 * RETAINED_BYTES).bytes[:] = 1
    region = shared_memory.region(0)
    end_period(region)
    assert not shared_memory.view(0, RETAINED_BYTES, RETAINED_BYTES).any()


def test_frames_survive_any_fragmentation() -> None:
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)

        def is_closing(self) -> bool:
            return False

    sent = [(kind, bytes([n]) * (n * 7)) for n in range(9) for kind in MessageType]
    sender = Channel(lambda *_: None)
    sender.connection_made(Transport())  # type: ignore[arg-type]
    for frame in sent:
        sender.send(*frame)
    stream = b"".join(written)
    for step in (1, 3, 13, 14, 1000, len(stream)):
        received: list[Any] = []
        receiver = Channel(lambda *frame, received=received: received.append(frame))
        for first in range(0, len(stream), step):
            receiver.data_received(stream[first : first + step])
        assert received == sent
