"""Memory that workers share with the device process."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.remote.channel import Asked, Channel, Kind
from qkv.engine.remote.shared_memory import ALIGNMENT, KEPT, Arena
from qkv.errors import NotNow


def shared_memory() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.integers(0, 9)), max_size=60))
def test_blocks_never_meet_and_all_come_back(steps: list[tuple[int, bool, int]]) -> None:
    arena = Arena(2, 1)
    region = arena.region(1)
    (whole,) = region._holes
    taken: list[Any] = []
    for size, leaves, which in steps:
        if leaves and taken:
            del taken[which % len(taken)]
        block: Any = region.take(size)
        assert block.first % ALIGNMENT == 0
        assert block.bytes.ctypes.data % ALIGNMENT == 0
        block.bytes[:] = len(taken) % 251
        taken.append(block)
    spans = sorted((b.first, b.first + b.bytes.nbytes) for b in taken)
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    taken.clear()
    block = None
    for _ in range(2):
        region.take(0)
    assert len(region._holes) == 1
    assert region._holes[0][0] + region._holes[0][1] == sum(whole)


def test_a_view_keeps_a_block_as_long_as_it_lives() -> None:
    region = Arena(1, 1 << 20).region(0)
    size = region._holes[0][1]
    block = region.take(size)
    view = block.bytes.data[5:9]
    del block
    with pytest.raises(NotNow):
        region.take(1)
    view.release()
    del view
    assert region.take(size).first == 0


def test_what_one_process_writes_the_other_reads() -> None:
    arena = Arena(2, 1 << 20)
    block = arena.region(1).take(1000)
    pid = os.fork()
    if not pid:
        arena.bytes(1, block.first, 1000)[:] = np.arange(1000) % 256
        os._exit(0)
    os.waitpid(pid, 0)
    assert (block.bytes == np.arange(1000) % 256).all()
    assert not arena.bytes(0, 0, 1 << 20).any()


def test_memory_goes_back_but_for_what_is_kept() -> None:
    region = Arena(1, 4 * KEPT).region(0)
    before = shared_memory()
    block = region.take(4 * KEPT)
    block.bytes[:] = 1
    assert shared_memory() - before >= 4 * KEPT
    del block
    assert abs(shared_memory() - before - KEPT) < 1 << 21


def test_frames_come_whole_however_they_are_cut() -> None:
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)

        def is_closing(self) -> bool:
            return False

    sent = [(kind, n, bytes([n]) * (n * 7)) for n in range(9) for kind in Kind]
    sender = Channel(lambda *_: None)
    sender.connection_made(Transport())  # type: ignore[arg-type]
    for frame in sent:
        sender.send(*frame)
    stream = b"".join(written)
    for step in (1, 3, 13, 14, 1000, len(stream)):
        came: list[Any] = []
        receiver = Channel(lambda *frame, came=came: came.append(frame))
        for first in range(0, len(stream), step):
            receiver.data_received(stream[first : first + step])
        assert came == sent


@pytest.mark.parametrize("wait_s", [None, 0.0, 1.5])
def test_what_is_asked_is_unpacked_as_it_was(wait_s: float | None) -> None:
    asked = Asked(64, 100, 1 << 40, 5, 2, 123.456, wait_s, b"head")
    assert Asked.unpack(asked.pack()) == asked
