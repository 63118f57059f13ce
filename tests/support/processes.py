"""Runs `qkv` commands as processes, and waits for conditions."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from support.forked_commands import ForkedCommand

TIMEOUT_S: Final = 120.0
"""Seconds that a test waits for an event before it fails; never a limit of speed."""


class Process:
    """A running `qkv` command.

    Args:
        arguments: arguments of the command.
        environment: variables in addition to those of this process.
        stdout: file for its standard output; None: discarded.
        module: Python module to run.
        is_forked: start it as a fork of a process that has imported the package, which is quicker.
        limits: sizes by limit of a resource.

    Attributes:
        popen: the process.
        lines: its lines on stderr so far, without line ends.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        stdout: Any = None,
        module: str = "qkv",
        is_forked: bool = True,
        limits: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        variables = {"QKV_DEVICE": "cpu", "QKV_THREADS": "1"} | environment
        start = start_command if is_forked else _start_new
        reader, writer = os.pipe()
        with open(writer, "wb"), open(os.devnull, "wb") as discarded:
            output = discarded if stdout is None else stdout
            out = output if isinstance(output, int) else output.fileno()
            self.popen = start(arguments, variables, out, writer, module, limits)
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen, args=(reader,))
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
        """True once the command has printed the curl line, its last before it serves."""
        return any(line.startswith("curl ") for line in self.lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.popen.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """Kills the process and those that it has started: workers alone would first drain."""
        pids = [self.popen.pid]
        # it has ended, or there is no /proc
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += map(int, Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits until the process has exited and stderr is read; returns the exit status."""
        status = self.popen.wait(TIMEOUT_S)
        self._listener.join(TIMEOUT_S)
        return status

    def _listen(self, reader: int) -> None:
        with open(reader) as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))


def start_command(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    stdout: int,
    stderr: int,
    module: str = "qkv",
    limits: Mapping[int, int] = MappingProxyType({}),
) -> ForkedCommand:
    """Starts a command with file descriptors for its output, such as of a terminal."""
    return ForkedCommand(module, arguments, os.environ | environment, stdout, stderr, limits)


def _start_new(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    stdout: int,
    stderr: int,
    module: str,
    limits: Mapping[int, int],
) -> subprocess.Popen[bytes]:
    """Starts a command as a user does, without what this process has imported."""

    def limit() -> None:
        for number, size in limits.items():
            resource.setrlimit(number, (size, size))

    words, variables = [sys.executable, "-m", module, *arguments], os.environ | environment
    begin = limit if limits else None
    return subprocess.Popen(words, env=variables, stdout=stdout, stderr=stderr, preexec_fn=begin)


def run_command(
    *arguments: object, limits: Mapping[int, int] = MappingProxyType({}), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `qkv` with arguments and environment variables to its end, in a process of its own."""
    words = tuple(map(str, arguments))
    with tempfile.TemporaryFile("w+") as output:
        process = Process(words, environment, stdout=output, limits=limits)
        with killed_at_the_end(process):
            status = process.wait()
        output.seek(0)
        lines = "".join(f"{line}\n" for line in process.lines)
        return subprocess.CompletedProcess(words, status, output.read(), lines)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until a condition holds, the less often the longer; fails after `TIMEOUT_S`."""
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        assert waited_s < TIMEOUT_S, "the condition did not become true"
        time.sleep(min(max(waited_s / 10, 0.005), 0.05))


def wait_until_asleep(pid: int) -> None:
    """Waits until a process sleeps in a system call; does nothing without /proc.

    Python handles a signal that arrives between its last check and a system call only after that
    call has returned.
    """
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")


@contextlib.contextmanager
def killed_at_the_end(process: Process) -> Iterator[Process]:
    """Kills a command, with its processes, at the end of a block, if it still runs."""
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.kill()
        process.wait()


def running_command(
    *arguments: str, module: str = "qkv", **environment: str
) -> contextlib.AbstractContextManager[Process]:
    """Runs `qkv` with arguments and environment variables; kills it at the end."""
    return killed_at_the_end(Process(arguments, environment, module=module))
