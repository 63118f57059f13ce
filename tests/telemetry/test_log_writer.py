"""Lines are written in their order, whoever reads them, or does not; what is lost is counted."""

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


def test_who_does_not_read_them_keeps_nobody_waiting() -> None:
    """Lines are dropped, and counted; those that are there come out once it is read."""
    ours, theirs = socket.socketpair()
    dropped: list[int] = []
    count = 0
    with ours:
        lines = BackgroundWriter(theirs.fileno(), dropped.append)
        lines.start()
        while not dropped:
            for _ in range(500):
                lines.add(b"%d %b\n" % (count, b"x" * 300))
                count += 1
        came: list[bytes] = []

        def read() -> None:
            while piece := ours.recv(1 << 20):
                came.append(piece)

        reader = threading.Thread(target=read)
        reader.start()
        lines.stop()
        wait_until(lambda: not lines._thread.is_alive())
        theirs.close()
        reader.join(TIMEOUT_S)
    numbers = [int(line.split()[0]) for line in b"".join(came).splitlines()]
    assert numbers == sorted(numbers)
    assert len(numbers) == count - sum(dropped)


def test_a_file_that_does_not_wait_gets_all_of_them() -> None:
    """Whoever shares a pipe may have said so for all (O_NONBLOCK)."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    dropped: list[int] = []
    lines = BackgroundWriter(writer, dropped.append)
    lines.start()
    for i in range(5000):
        lines.add(b"%d %b\n" % (i, b"x" * 100))
    came = b""
    while came.count(b"\n") < 5000:
        came += os.read(reader, 1 << 16)
    lines.stop()
    os.close(reader)
    os.close(writer)
    assert [int(line.split()[0]) for line in came.splitlines()] == list(range(5000))
    assert not dropped


def test_what_cannot_be_written_is_counted_and_what_can_be_again_is_written(tmp_path: Path) -> None:
    """A disk was full for a while, or nobody read."""
    ours, theirs = socket.socketpair()
    ours.close()
    dropped: list[int] = []
    lines = BackgroundWriter(theirs.fileno(), dropped.append)
    lines.start()
    for _ in range(70):
        lines.add(b"x" * 99 + b"\n")
    wait_until(lambda: sum(dropped) == 70)
    path = tmp_path / "log"
    with path.open("wb") as file:
        os.dup2(file.fileno(), theirs.fileno())
    lines.add(b"again\n")
    lines.stop()
    theirs.close()
    assert path.read_bytes() == b"again\n"
    assert sum(dropped) == 70


BROKEN_OFF = """
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
def test_a_line_that_broke_off_spoils_no_other(tmp_path: Path) -> None:
    """A disk may be full within one."""
    path = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN_OFF, str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    first, second, part, last = path.read_text().splitlines()
    assert (first[:2], second[:2], part) == ("0 ", "1 ", "2 " + "x" * 48)
    assert last == "again"
    assert ran.stdout == "[3]\n"


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
def test_what_was_added_before_the_end_is_written(tmp_path: Path, interval_s: float) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        lines = BackgroundWriter(file.fileno(), interval_s=interval_s)
        lines.start()
        for i in range(1000):
            lines.add(b"%d\n" % i)
        lines.stop()
    assert path.read_text().split() == list(map(str, range(1000)))
