"""Runs `qkv` commands as processes, and waits for conditions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 60.0
"""How long a test waits for something before it fails; never a bound on speed."""


class Process:
    """A running `qkv` command.

    Args:
        arguments: of the command.
        environment: beside this process's own.
        stdout: where its standard output goes.

    Attributes:
        popen: the process.
        lines: the lines it has written to stderr, without line ends.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        stdout: Any = None,
        module: str = "qkv",
    ) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | {"QKV_DEVICE": "cpu", "QKV_THREADS": "1"} | environment,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    @property
    def url(self) -> str:
        """The URL of the service; waits until the command has printed it."""
        wait_until(lambda: self.is_serving or self.popen.poll() is not None)
        assert self.is_serving, self.lines
        (line,) = (line for line in self.lines if line.startswith("curl "))
        return line.split()[1].removesuffix("/v1/attention/softmax")

    @property
    def is_serving(self) -> bool:
        """Whether the command has printed the curl line, its last before it serves."""
        return any(line.startswith("curl ") for line in self.lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Returns the exit status, once stderr is read to its end."""
        status = self.popen.wait(TIMEOUT_S)
        self._listener.join(TIMEOUT_S)
        return status

    def _listen(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))


def wait_until(happened: Callable[[], bool]) -> None:
    """Polls until a condition holds; fails after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def wait_until_asleep(pid: int) -> None:
    """Returns once a process sleeps in a system call, where /proc says so.

    Python handles a signal that arrives between its last check and a system call only after that
    call has returned.
    """
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")


@contextlib.contextmanager
def running_command(*arguments: str, module: str = "qkv", **environment: str) -> Iterator[Process]:
    """Runs `qkv` with arguments, and settings in the environment; kills it at the end."""
    process = Process(arguments, environment, module=module)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.wait()
