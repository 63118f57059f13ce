"""Counts the Python work of a request: bytecodes, and functions, in one worker.

    .venv/bin/python bench/request_work.py

Seconds differ between machines and from run to run. These counts depend only on the code and on the
version of Python, so that everybody sees what a change costs. They say nothing about work in C.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, BinaryIO, Final, NamedTuple

import bodies
from load import ID_DIGITS, BenchRequest, encode_request
from service import running_service

import qkv
from qkv.cli.main import main as qkv_command

OURS: Final = str(Path(qkv.__file__).parent)
WARM_UP: Final = 30  # requests
COUNTED: Final = 50  # requests
SIX_TOKENS: Final = (1, 1, 6, 4)
BACKGROUND: Final = {"WorkerState.run_heartbeat", "Server.main_loop", "ClientTimer._check"}
"""Functions that run beside requests, more often the longer these take."""
_OFF, _ON, _WRITE = range(3)


class RequestWork(NamedTuple):
    """The work of one kind of request.

    Attributes:
        bytecodes: executed by one request, on average.
        functions: distinct ones that were entered, those of libraries included.
        files: distinct files of qkv that these are in.
        shares: bytecodes of a request by file, those that take most first.
    """

    bytecodes: float
    functions: int
    files: int
    shares: dict[str, float]


class WorkTracer:
    """Counts the bytecodes of each function in all threads while a byte in a file is `_ON`.

    Python calls it for each function that is entered. It counts in the process that this one forks.

    Args:
        folder: of the file with the byte, and of the file with the counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "state").open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), 1)
        self._counts: Counter[CodeType] = Counter()

    def start(self) -> None:
        """Traces the worker that is forked later: its first thread, and those that it starts."""
        os.register_at_fork(after_in_child=self._trace)

    def _trace(self) -> None:
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if self._state[0] == _OFF:
            return None
        if self._state[0] == _WRITE:
            self._state[0] = _OFF
            self._write()
            return None
        if _is_in_background(frame):
            return None
        self._counts[frame.f_code] += 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode":
            self._counts[frame.f_code] += 1
        return self._on_opcode

    def _write(self) -> None:
        rows = [(c.co_filename, c.co_qualname, n) for c, n in self._counts.items()]
        self._counts.clear()
        unfinished = self._folder / "unfinished"
        unfinished.write_text(json.dumps(rows))
        unfinished.rename(self._folder / "counts")


def _is_in_background(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in BACKGROUND:
            return True
        frame = frame.f_back
    return False


class CountedService:
    """A service of one worker whose work is counted, and one connection to it.

    Args:
        folder: as for `WorkTracer`.
        connection: connected to the service.
    """

    def __init__(self, folder: Path, connection: socket.socket) -> None:
        self._folder, self._connection = folder, connection
        self._responses: BinaryIO = connection.makefile("rb")
        self._sent = 0

    def count(self, request: BenchRequest) -> RequestWork:
        """Returns the work of a request, each time with a new id if it has one."""
        self._send(request, WARM_UP)
        self._set_state(_ON)
        self._send(request, COUNTED)
        self._set_state(_WRITE)
        counts = self._folder / "counts"
        while not counts.exists():  # the next function that is entered writes it
            time.sleep(0.01)
        rows = json.loads(counts.read_text())
        counts.unlink()
        return _sum(rows)

    def _set_state(self, state: int) -> None:
        with (self._folder / "state").open("r+b") as file:
            file.write(bytes([state]))

    def _send(self, request: BenchRequest, times: int) -> None:
        before, after = encode_request(request, "127.0.0.1")
        for _ in range(times):
            self._sent += 1
            new_id = b"%0*d" % (ID_DIGITS, self._sent) if after else b""
            self._connection.sendall(before + new_id + after)
            self._receive()

    def _receive(self) -> None:
        status = self._responses.readline()
        length = 0
        while (line := self._responses.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = self._responses.read(length)
        assert b" 200 " in status, body[:600]


def _sum(rows: list[tuple[str, str, int]]) -> RequestWork:
    shares: Counter[str] = Counter()
    for file, _, count in rows:
        shares[file.removeprefix(f"{OURS}/")] += count
    return RequestWork(
        sum(shares.values()) / COUNTED,
        len(rows),
        len({file for file, *_ in rows if file.startswith(OURS)}),
        {file: count / COUNTED for file, count in shares.most_common()},
    )


def measure() -> dict[str, RequestWork]:
    """Returns the work of each kind of request by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "state").write_bytes(bytes([_OFF]))
        with running_service((__file__, name), QKV_WORKERS="1") as service:
            small, six = bodies.tensors_of(bodies.SHAPES["S"]), bodies.tensors_of(SIX_TOKENS)
            at = service.address
            requests = {
                "V2 binary, S, new ids": bodies.build_request(
                    at, "V2 binary", small, has_new_ids=True
                ),
                "JSON, six tokens, with weights": bodies.build_request(
                    at, "JSON, lists", six, weights=True
                ),
            }
            with closing(socket.create_connection(at)) as connection:
                counted = CountedService(folder, connection)
                return {name: counted.count(request) for name, request in requests.items()}


def print_table(found: dict[str, RequestWork], files: int = 8) -> None:
    """Prints the work of each kind of request, and the files that take most of it."""
    print(f"Python {platform.python_version()}, {COUNTED} requests after {WARM_UP}\n")
    for name, work in found.items():
        print(f"{name}: {work.bytecodes:,.0f} bytecodes, {work.functions} functions, "
              f"{work.files} files of qkv")  # fmt: skip
        for file, count in list(work.shares.items())[:files]:
            print(f"  {count:7,.0f}  {file}")
        print()


def main() -> None:
    """Measures; with the name of a folder, runs a traced `qkv` with the other arguments."""
    if len(sys.argv) == 1:
        print_table(measure())
        return
    WorkTracer(Path(sys.argv.pop(1))).start()
    qkv_command()


if __name__ == "__main__":
    main()
