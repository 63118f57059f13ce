"""`Program`: runs another program on the oracle's cases, and reads the results that it writes."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from qkv.errors import InvalidContent, QkvError
from qkv.testing.call import Call
from qkv.testing.case_file import CaseFile, read_results
from qkv.testing.case_spec import CaseSpec
from qkv.testing.function_runner import Outcome
from qkv.testing.judgement import check_results, results_by_name
from qkv.wire import safetensors

_NOT_TAKEN: Final = 77  # the status of a skipped test in GNU Automake's protocol
_PLACEHOLDERS: Final = ("{in}", "{out}")
_TAIL: Final = 4096  # bytes of stderr in which the last line is looked for
_LONGEST: Final = 200


class Program:
    """A program that reads a case file and writes a file of results; a `Runner`.

    It is started without a shell, once for each case, in the current directory.

    Args:
        command: its words, with {in} and {out} for the paths of both files.
        timeout_s: time limit of one run in seconds; then its process group is killed.
        needs_gradients: True if results without gradients are a fault.

    Raises:
        InvalidContent: the command has no {in} or {out}, or a quote is open.
    """

    def __init__(
        self, command: str, *, timeout_s: float = 60, needs_gradients: bool = False
    ) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidContent(f"the command is invalid: got {command!r}: {error}") from None
        for placeholder in _PLACEHOLDERS:
            if not any(placeholder in word for word in self._words):
                raise InvalidContent(
                    f"the command is invalid: got {command!r}, expected "
                    f"{' and '.join(_PLACEHOLDERS)} in it, for the paths of the two files"
                )
        self._timeout_s, self._needs_gradients = timeout_s, needs_gradients

    def __call__(self, spec: CaseSpec, call: Call) -> Outcome:
        """Runs the program on a case.

        Raises:
            OSError: it cannot be started, or the case cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="qkv-") as folder:
            source, target = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
            with source.open("wb") as file:
                file.writelines(safetensors.encode(CaseFile(spec, call).to_message(), "inputs"))
            with Path(folder, "stderr").open("w+b") as stderr:
                status = self._run(source, target, stderr)
                last_line = _last_line(stderr).replace(folder, "...")
            if status == _NOT_TAKEN:
                return Outcome({}, not_run=last_line or f"the program exits with {_NOT_TAKEN}")
            if status != 0:
                return Outcome({}, _join(_fault(status, self._timeout_s), last_line))
            return self._read(target, call, last_line)

    def _run(self, source: Path, target: Path, stderr: IO[bytes]) -> int | None:
        """Returns the exit status, negative for a signal; None after the timeout."""
        paths = dict(zip(_PLACEHOLDERS, (str(source), str(target)), strict=True))
        process = None
        try:
            with _delayed_signals():
                # with a group of its own, the program and what it starts can be ended together
                process = subprocess.Popen(
                    [_replace(word, paths) for word in self._words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    process_group=0,
                )
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None and process.returncode is None:  # the timeout, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _read(self, target: Path, call: Call, last_line: str) -> Outcome:
        """Returns the results in the program's file, or the fault of it."""
        try:
            content = _read_regular(target)
        except OSError as error:
            return Outcome({}, _join(f"no result in {{out}}: {error.strerror}", last_line))
        try:
            results = read_results(safetensors.decode(content, "outputs"), call)
            check_results(call, results, self._needs_gradients)
        except QkvError as error:
            return Outcome({}, _join(f"wrong result in {{out}}: {error.detail}", last_line))
        return Outcome(results_by_name(results))


@contextmanager
def _delayed_signals() -> Iterator[None]:
    """Handles signals that would end this process after the body.

    A handler that raises inside `Popen` would leave a program running that nobody knows.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in others
        yield
        return
    arrived: list[int] = []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    delayed = {n: handler for n, handler in handlers.items() if callable(handler)}
    for number in delayed:
        signal.signal(number, lambda n, _: arrived.append(n))
    try:
        yield
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
        for late_number in arrived:
            signal.raise_signal(late_number)


def _read_regular(path: Path) -> bytes:
    """Returns the content of a file; the read of a FIFO or a device might never end.

    Raises:
        OSError: it is missing, or not a regular file.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):  # the error of a folder is the system's
        raise OSError(errno.EINVAL, "not a regular file")
    return path.read_bytes()


def _replace(word: str, paths: Mapping[str, str]) -> str:
    for placeholder, path in paths.items():
        word = word.replace(placeholder, path)
    return word


def _fault(status: int | None, timeout_s: float) -> str:
    if status is None:
        return f"no result after {timeout_s:g} s"
    if status > 0:
        return f"exits with status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-status}"


def _join(fault: str, last_line: str) -> str:
    return f"{fault}: {last_line}" if last_line else fault


def _last_line(stderr: IO[bytes]) -> str:
    """Returns the last line that is not blank, without control characters."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL))
    lines = stderr.read().decode(errors="replace").split("\n")
    plain = ("".join(c if c.isprintable() else " " for c in line).strip() for line in lines)
    return next((line[:_LONGEST] for line in reversed(list(plain)) if line), "")
