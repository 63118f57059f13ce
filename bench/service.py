"""A service in processes of its own, and the memory that they hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_EVERY_S: Final = 0.25  # adding up costs a few milliseconds of a CPU for each process
_SETTLED_S: Final = 0.5  # after the last answer, for buffers to be given back
_LINES: Final = 20


@dataclass
class Memory:
    """Bytes that a service held: before, at most while it was asked, and after."""

    before: int
    after: int = 0
    seen: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        """The largest that was seen; not each peak is."""
        return max(self.before, self.after, *self.seen)


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        address: host and port.
        pid: the parent's.
        workers: how many.
        said: the last lines of what it wrote on stderr.
    """

    address: tuple[str, int]
    pid: int
    workers: int
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))

    @property
    def resident(self) -> int:
        """Bytes of all its processes; what several share counts once."""
        return sum(map(_share, _family(self.pid)))

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        """Looks at its memory while the block runs, and again when that is over."""
        memory, over = Memory(self.resident), threading.Event()

        def watch() -> None:
            while not over.wait(_EVERY_S):
                memory.seen.append(self.resident)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield memory
        finally:
            over.set()
            thread.join()
        time.sleep(_SETTLED_S)
        memory.after = self.resident


@contextmanager
def serving(**settings: str) -> Iterator[Service]:
    """A service on a free port, on the CPU; otherwise as QKV_ variables, or these, set it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qkv", "serve", "--port", "0"],
        env=os.environ | {"QKV_DEVICE": "cpu"} | settings,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://(\S+):(\d+) \(\w+, (\d+) worker", line)
        assert found is not None, line + process.stderr.read()
        service = Service((found[1], int(found[2])), process.pid, int(found[3]))
        # a pipe that nobody reads would fill, and hold up whoever writes to it
        reading = threading.Thread(target=service.said.extend, args=(process.stderr,))
        reading.start()
        try:
            yield service
        finally:
            process.terminate()
            reading.join()
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    children: list[str] = []
    with suppress(FileNotFoundError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
    return [pid, *(found for child in children for found in _family(int(child)))]


def _share(pid: int) -> int:
    """Proportional set size: pages that n processes share count as an n-th in each."""
    with suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        if found := re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE):
            return int(found[1]) * 1024
    return 0
