"""Load generator: repeats one request over open connections, from processes of its own.

It compares every response with the correct one and reads the timing in it. Common load generators
only count bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

PROCESSES: Final = 2  # client processes; a small request takes one of them about 50 us of CPU
WARM_UP: Final = 5
LEAST: Final = 3  # responses, regardless of the time

STAGES: Final = (b"queue", b"transfer", b"compute", b"total")
_STAGE: Final = re.compile(rb'(queue|transfer|compute|total)_ms\\?":([0-9.e+-]+)')
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_GOOD: Final = b"HTTP/1.1 200 "


@dataclass(frozen=True)
class Asked:
    """A request, and the bytes that every response to it has.

    Attributes:
        path: path of the POST request.
        headers: the headers without Content-Length.
        body: the body.
        right: the tensors, as the first or last bytes of the response body.
        at_end: True if they are the last bytes.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    right: bytes = b""
    at_end: bool = False


class Asking(NamedTuple):
    """Instructions for a client process.

    Attributes:
        host, port: address of the service.
        asked: the request.
        connections: number of open connections.
        at_once: number of them with a request in flight; the others are idle.
        seconds: duration of the measurement.
    """

    host: str
    port: int
    asked: Asked
    connections: int
    at_once: int
    seconds: float


class Answer(NamedTuple):
    """Milliseconds of a response: measured by the client, and of the stages in the response."""

    ms: float
    queue: float
    transfer: float
    compute: float
    total: float

    @property
    def added(self) -> float:
        """Milliseconds without the attention itself."""
        return self.ms - self.compute


class Load(NamedTuple):
    """Responses of a measurement; `rate` is in responses per second."""

    answers: list[Answer]
    rate: float


def load(
    address: tuple[str, int], asked: Asked, seconds: float, connections: int = 1, at_once: int = 0
) -> Load:
    """Sends a request repeatedly, after a warm-up that uses every connection.

    Args:
        address: host and port of the service.
        asked: the request.
        seconds: duration; responses to requests in flight at its end are received too.
        connections: number of open connections.
        at_once: number of them with a request in flight; 0: all.

    Raises:
        RuntimeError: a response was wrong.
    """
    at_once = at_once or connections
    count = min(PROCESSES, at_once)
    # Not as __main__, because it pickles classes of this module.
    command = [sys.executable, "-c", "import load; load.main()"]
    here, pipe = Path(__file__).parent, subprocess.PIPE
    started = [subprocess.Popen(command, cwd=here, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        for i, process in enumerate(started):
            own = [len(range(i, total, count)) for total in (connections, at_once)]
            _tell(process, Asking(*address, asked, own[0], own[1], seconds))
        for process in started:
            _hear(process)
        for process in started:
            _tell(process, "go")
        heard = [_hear(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return Load([answer for came, _ in heard for answer in came], sum(rate for _, rate in heard))


def _tell(process: subprocess.Popen[bytes], what: Any) -> None:
    assert process.stdin is not None
    pickle.dump(what, process.stdin)
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except EOFError:
        raise RuntimeError("a client process has failed; its error is above") from None


class _Connection(asyncio.Protocol):
    """One connection, and the response that it receives."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller
        self._came = bytearray()
        self._size: int | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop has its own class
        self._transport = transport

    def ask(self) -> None:
        self._since = time.perf_counter()
        self._transport.write(self._caller.request)

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self._size is None:
            if (end := self._came.find(b"\r\n\r\n")) < 0:
                return
            length = _LENGTH.search(self._came, 0, end)
            self._head = end + 4
            self._size = self._head + (int(length[1]) if length else 0)
        if len(self._came) >= self._size:
            now, answer = time.perf_counter(), self._came
            self._came, self._size = bytearray(), None
            self._caller.answered(self, (now - self._since) * 1e3, answer, self._head)

    def connection_lost(self, error: Exception | None) -> None:
        self._caller.give_up(f"connection lost: {error}")


class _Caller:
    """The connections of a client process."""

    def __init__(self, asking: Asking) -> None:
        asked = asking.asked
        headers = {"Host": asking.host, "Content-Length": len(asked.body), **asked.headers}
        lines = [f"POST {asked.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        self.request = "\r\n".join([*lines, "", ""]).encode() + asked.body
        self._asking, self._right, self._at_end = asking, asked.right, asked.at_end

    async def run(self) -> None:
        """Warms up, reports that it is ready, waits for the start, and reports the responses."""
        asking, loop = self._asking, asyncio.get_running_loop()
        self._idle: deque[_Connection] = deque()
        for _ in range(asking.connections):
            made = await loop.create_connection(lambda: _Connection(self), asking.host, asking.port)
            self._idle.append(made[1])
        await self._ask(0.0, max(WARM_UP, asking.connections))
        _say("ready")
        pickle.load(sys.stdin.buffer)
        _say(await self._ask(asking.seconds, LEAST))

    async def _ask(self, seconds: float, least: int) -> tuple[list[Answer], float]:
        """Returns the responses and their rate per second; at the end waits for those in flight."""
        self._answers: list[Answer] = []
        self._done = asyncio.get_running_loop().create_future()
        self._busy, self._least = self._asking.at_once, least
        started = time.perf_counter()
        self._until = started + seconds
        for _ in range(self._busy):
            self._idle.popleft().ask()
        await self._done
        return self._answers, len(self._answers) / (time.perf_counter() - started)

    def answered(self, connection: _Connection, ms: float, answer: bytearray, head: int) -> None:
        """Checks and records a response; the longest idle connection sends the next request."""
        size = len(self._right)
        tensors = len(answer) - size if self._at_end else head
        rest = (head, tensors) if self._at_end else (head + size, len(answer))
        if not (answer.startswith(_GOOD) and answer[tensors : tensors + size] == self._right):
            self.give_up(f"wrong response: {bytes(answer[:600])!r}")
            return
        said = {name: float(value) for name, value in _STAGE.findall(answer, *rest)}
        self._answers.append(Answer(ms, *(said[stage] for stage in STAGES)))
        self._idle.append(connection)
        if time.perf_counter() < self._until or len(self._answers) < self._least:
            self._idle.popleft().ask()
            return
        self._busy -= 1
        if not self._busy:
            self._done.set_result(None)

    def give_up(self, why: str) -> None:
        """Ends the measurement with an error."""
        if not self._done.done():
            self._done.set_exception(RuntimeError(why))


def _say(what: Any) -> None:
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.flush()


def main() -> None:
    """Runs a client process: reads instructions from stdin and writes responses to stdout."""
    told = pickle.load(sys.stdin.buffer)
    uvloop.run(_Caller(told).run())
