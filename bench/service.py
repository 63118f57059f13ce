"""A service in processes of its own, and their memory."""

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

_EVERY_S: Final = 0.25  # each sample takes a few milliseconds of CPU per process
_SETTLED_S: Final = 0.5  # after the last response, until buffers are freed
_LINES: Final = 20


@dataclass
class Memory:
    """Resident bytes of a service: before requests, samples meanwhile, and afterwards."""

    before: int
    after: int = 0
    seen: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        """The largest sample; short peaks can fall between samples."""
        return max(self.before, self.after, *self.seen)


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        address: host and port.
        pid: process id of the supervisor.
        workers: number of workers.
        said: last lines of stderr.
    """

    address: tuple[str, int]
    pid: int
    workers: int
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))

    @property
    def resident(self) -> int:
        """Resident bytes of all its processes; shared pages count once."""
        return sum(map(_share, _family(self.pid)))

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        """Samples the memory while the block runs, and once after it."""
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
    """Runs a service on a free port, on the CPU; `settings` are further QKV_ variables."""
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
        # An unread pipe would fill and block the service.
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
    """Returns the ids of a process and all its descendants."""
    children: list[str] = []
    with suppress(FileNotFoundError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
    return [pid, *(found for child in children for found in _family(int(child)))]


def _share(pid: int) -> int:
    """Returns the proportional set size: pages that n processes share count as an n-th in each."""
    with suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        if found := re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE):
            return int(found[1]) * 1024
    return 0
