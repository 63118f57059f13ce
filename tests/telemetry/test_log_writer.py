"""BackgroundWriter: lines are written in order, and dropped lines are counted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qkv.telemetry.log_writer import BackgroundWriter
from support.processes import TIMEOUT_S, wait_until

SOCKET_BYTES = 1 << 20
"""More than a pair of sockets holds by itself."""


def test_slow_reader_blocks_no_writer() -> None:
    """Lines above 8 MiB are dropped and counted; the others are written once the reader reads."""
    reader_end, writer_end = socket.socketpair()
    dropped: list[int] = []
    count = 0
    with reader_end:
        lines = BackgroundWriter(writer_end.fileno(), dropped.append)
        lines.start()
        while not dropped:
            for _ in range(500):
                lines.add(b"%d %b\n" % (count, b"x" * 300))
                count += 1
        received: list[bytes] = []

        def read() -> None:
            while piece := reader_end.recv(1 << 20):
                received.append(piece)

        reader = threading.Thread(target=read, daemon=True)  # a failed test ends
        reader.start()
        lines.stop()
        wait_until(lambda: "qkv-lines" not in {t.name for t in threading.enumerate()})
        writer_end.close()
        reader.join(TIMEOUT_S)
    text = b"".join(received)
    assert len(text) < (8 << 20) + SOCKET_BYTES
    numbers = [int(line.split()[0]) for line in text.splitlines()]
    assert numbers == sorted(numbers)
    assert len(numbers) == count - sum(dropped)


def test_non_blocking_pipe_gets_all_lines() -> None:
    """A process that shares the pipe may have set O_NONBLOCK for all."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    dropped: list[int] = []
    lines = BackgroundWriter(writer, dropped.append)
    lines.start()
    for i in range(5000):
        lines.add(b"%d %b\n" % (i, b"x" * 100))
    received = b""
    while received.count(b"\n") < 5000:
        received += os.read(reader, 1 << 16)
    lines.stop()
    os.close(reader)
    os.close(writer)
    assert [int(line.split()[0]) for line in received.splitlines()] == list(range(5000))
    assert not dropped


def test_failed_writes_are_counted_and_later_lines_are_written(tmp_path: Path) -> None:
    """A disk may be full for a while, or a pipe without a reader."""
    reader_end, writer_end = socket.socketpair()
    reader_end.close()
    dropped: list[int] = []
    lines = BackgroundWriter(writer_end.fileno(), dropped.append)
    lines.start()
    for _ in range(70):
        lines.add(b"x" * 99 + b"\n")
    wait_until(lambda: sum(dropped) == 70)
    path = tmp_path / "log"
    with path.open("wb") as file:
        os.dup2(file.fileno(), writer_end.fileno())
    lines.add(b"again\n")
    lines.stop()
    writer_end.close()
    assert path.read_bytes() == b"again\n"
    assert sum(dropped) == 70


FULL_DISK = """
import resource, signal, sys
from qkv.telemetry.log_writer import BackgroundWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
with open(sys.argv[1], "wb") as file:
    dropped = []
    lines = BackgroundWriter(file.fileno(), dropped.append, 0.2)
    lines.start()
    for i in range(5):
        lines.add(b"%d %b\\n" % (i, b"x" * 97))
    while not dropped:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    lines.add(b"again\\n")
    lines.stop()
print(dropped)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_incomplete_line_is_ended_before_the_next(tmp_path: Path) -> None:
    """A disk may become full within a line."""
    path = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    first, second, part, last = path.read_text().splitlines()
    assert (first[:2], second[:2], part) == ("0 ", "1 ", "2 " + "x" * 48)
    assert last == "again"
    assert done.stdout == "[3]\n"


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
def test_stop_writes_all_queued_lines(tmp_path: Path, interval_s: float) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        lines = BackgroundWriter(file.fileno(), interval_s=interval_s)
        lines.start()
        for i in range(1000):
            lines.add(b"%d\n" % i)
        lines.stop()
    assert path.read_text().split() == list(map(str, range(1000)))
