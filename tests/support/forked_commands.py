"""Starts commands as forks of a process that has imported the package.

Until a service is ready, the process of `python -m qkv serve` takes 2.7 seconds of a processor,
most of them for imports, and such a fork 0.3. The server is that of Python's `multiprocessing`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Final
from unittest import mock

from support.paths import ROOT

_SERVER: Final = multiprocessing.get_context("forkserver")
_PREPARED: Final = "support.prepared_service"
# This module too, because each fork needs it; pytest would take 0.1 s in each.
_SERVER.set_forkserver_preload([_PREPARED, __name__])


class ForkedCommand:
    """A command, with those methods of `subprocess.Popen` that tests use.

    Args:
        module: Python module to run.
        arguments: of the command.
        environment: all its variables.
        stdout: file descriptor of its standard output.
        stderr: file descriptor of its standard error.
        limits: sizes by limit of a resource, such as `RLIMIT_DATA`.
    """

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        stdout: int,
        stderr: int,
        limits: Mapping[int, int],
    ) -> None:
        # what else a process inherits from the one that starts it
        is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        both = {resource.RLIMIT_NOFILE: resource.getrlimit(resource.RLIMIT_NOFILE)}
        both |= {limit: (size, size) for limit, size in limits.items()}
        inherited = os.getcwd(), both, is_hangup_ignored
        streams = [Connection(os.dup(fd), readable=False) for fd in (stdout, stderr)]
        self._process = _SERVER.Process(
            target=_run, args=(module, arguments, environment, streams, *inherited), daemon=True
        )
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
            # Python 3.11 gives the server no path of this process. `start` starts a new server if
            # the first one has ended.
            self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status; None while the command runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status.

        Raises:
            subprocess.TimeoutExpired: the command still runs.
        """
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("qkv", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal to the command unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    streams: list[Connection],
    folder: str,
    limits: dict[int, tuple[int, int]],
    is_hangup_ignored: bool,
) -> None:
    """Runs the command in the fork, which ends with it."""
    importlib.import_module(_PREPARED)  # the server has done it, but hides that it failed
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.chdir(folder)
    for limit, sizes in limits.items():
        resource.setrlimit(limit, sizes)
    # a limit of the sizes of files would cut the bytecode that it writes, for all later processes
    sys.dont_write_bytecode |= limits.keys() > {resource.RLIMIT_NOFILE}
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_hangup_ignored else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
