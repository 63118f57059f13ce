"""Starts a service for benchmarks and samples the memory of its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

_SAMPLE_PERIOD_S: Final = 0.25  # each sample takes a few milliseconds of CPU per process
_SETTLE_S: Final = 0.5  # after the last response, until buffers are freed
_MAX_STDERR_LINES: Final = 20


@dataclass
class ResidentMemory:
    """Resident bytes of a service: before requests, samples during requests, and after them."""

    before: int
    after: int = 0
    samples: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The largest sample; short peaks can fall between samples."""
        return max(self.before, self.after, *self.samples)


class ProcessTimes(NamedTuple):
    """CPU seconds of the HTTP workers, and of the device processes."""

    http: float
    device: float


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        address: host and port.
        pid: process id of the supervisor.
        workers: number of workers.
        stderr_lines: last lines of stderr.
    """

    address: tuple[str, int]
    pid: int
    workers: int
    stderr_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_STDERR_LINES))

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of all processes of the service; shared pages count once."""
        return sum(_proportional_bytes(pid, "Pss") for pid in _process_tree(self.pid))

    @property
    def own_bytes(self) -> int:
        """The same without pages of files: other programs that share them change their count."""
        pids = _process_tree(self.pid)
        return sum(_proportional_bytes(pid, "Pss_Anon", "Pss_Shmem") for pid in pids)

    @property
    def cpu_s(self) -> ProcessTimes:
        """CPU time of the HTTP workers and of the device processes since their start."""
        listening, others = 0.0, 0.0
        for pid in _process_tree(self.pid)[1:]:
            if _listens(pid, self.address[1]):
                listening += _cpu_s(pid)
            else:
                others += _cpu_s(pid)
        return ProcessTimes(listening, others)

    @contextmanager
    def sample_memory(self) -> Iterator[ResidentMemory]:
        """Samples the memory while the block runs, and once after it."""
        memory, stop = ResidentMemory(self.resident_bytes), threading.Event()

        def sample() -> None:
            while not stop.wait(_SAMPLE_PERIOD_S):
                memory.samples.append(self.resident_bytes)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield memory
        finally:
            stop.set()
            thread.join()
        time.sleep(_SETTLE_S)
        memory.after = self.resident_bytes


@contextmanager
def running_service(program: Sequence[str] = ("-m", "qkv"), **settings: str) -> Iterator[Service]:
    """Runs a service on a free port, on the CPU.

    Args:
        program: Python's arguments for a program with the arguments of `qkv`.
        **settings: further QKV_ variables.
    """
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0"],
        env=os.environ | {"QKV_DEVICE": "cpu"} | settings,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        match = re.search(r"http://(\S+):(\d+) \(\w+, (\d+) worker", line)
        assert match is not None, line + process.stderr.read()
        service = Service((match[1], int(match[2])), process.pid, int(match[3]))
        # An unread pipe would fill and block the service.
        reader = threading.Thread(target=service.stderr_lines.extend, args=(process.stderr,))
        reader.start()
        try:
            yield service
        finally:
            process.terminate()
            reader.join()
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def _process_tree(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants."""
    children: list[str] = []
    with suppress(FileNotFoundError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
    return [pid, *(each for child in children for each in _process_tree(int(child)))]


def _proportional_bytes(pid: int, *names: str) -> int:
    """Returns proportional set sizes: pages that n processes share count as an n-th in each."""
    with suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE))
        return 1024 * sum(int(found.get(name, 0)) for name in names)
    return 0


def _listens(pid: int, port: int) -> bool:
    """Returns True if a process has the socket that listens at this port: it is a worker."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        f"socket:[{inode}]"
        for _, local, _, state, *_, inode in (row[:10] for row in rows)
        if state == "0A" and int(local.partition(":")[2], 16) == port
    }
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed
            if os.readlink(path) in listening:
                return True
    return False


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
