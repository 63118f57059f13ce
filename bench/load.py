"""Asks one request again and again over open connections, from processes of its own.

Every answer is held against the right one, and gives its own account of where its time went, which
is why this is no load generator off the shelf: those count bytes.
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

PROCESSES: Final = 2  # that ask; a small request takes one of them about 50 us of CPU
WARM_UP: Final = 5
LEAST: Final = 3  # answers, however long they take

STAGES: Final = (b"queue", b"transfer", b"compute", b"total")
_STAGE: Final = re.compile(rb'(queue|transfer|compute|total)_ms\\?":([0-9.e+-]+)')
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_GOOD: Final = b"HTTP/1.1 200 "


@dataclass(frozen=True)
class Asked:
    """A request, and what is the same in every answer to it.

    Attributes:
        path: where it is posted.
        headers: but for Content-Length.
        body: what is posted.
        right: what the answer's body begins or ends with: its tensors.
        at_end: whether it ends with it.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    right: bytes = b""
    at_end: bool = False


class Asking(NamedTuple):
    """What a process that asks is told.

    Attributes:
        host, port: of whom.
        asked: what.
        connections: how many are open.
        at_once: how many of them ask at the same time; the others wait for their turn.
        seconds: for how long.
    """

    host: str
    port: int
    asked: Asked
    connections: int
    at_once: int
    seconds: float


class Answer(NamedTuple):
    """An answer's milliseconds: as the caller saw it, and by the stages that it names."""

    ms: float
    queue: float
    transfer: float
    compute: float
    total: float

    @property
    def added(self) -> float:
        """All that is not the attention itself."""
        return self.ms - self.compute


class Load(NamedTuple):
    """What came of asking; `rate` is in answers a second."""

    answers: list[Answer]
    rate: float


def load(
    address: tuple[str, int], asked: Asked, seconds: float, connections: int = 1, at_once: int = 0
) -> Load:
    """Asks for that long, after a warm-up in which every connection has its turn.

    Args:
        address: whom.
        asked: what.
        seconds: for how long; what is on its way then is waited for.
        connections: open ones.
        at_once: how many of them ask at the same time; 0: all.

    Raises:
        RuntimeError: an answer was wrong.
    """
    at_once = at_once or connections
    count = min(PROCESSES, at_once)
    command = [sys.executable, "-c", "import load; load.main()"]  # not as __main__: it pickles
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
        raise RuntimeError("a process that asks has given up; what it said is above") from None


class _Connection(asyncio.Protocol):
    """One connection, and the answer that is on its way to it."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller
        self._came = bytearray()
        self._size: int | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
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
        self._caller.give_up(f"a connection was lost: {error}")


class _Caller:
    """A process that asks."""

    def __init__(self, asking: Asking) -> None:
        asked = asking.asked
        headers = {"Host": asking.host, "Content-Length": len(asked.body), **asked.headers}
        lines = [f"POST {asked.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        self.request = "\r\n".join([*lines, "", ""]).encode() + asked.body
        self._asking, self._right, self._at_end = asking, asked.right, asked.at_end

    async def run(self) -> None:
        """Says that it is ready once it is warm, and after the word to go what came."""
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
        """The answers, and how many came a second; what is on its way at the end is waited for."""
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
        """Takes an answer; of those that wait, who has waited longest asks next."""
        size = len(self._right)
        tensors = len(answer) - size if self._at_end else head
        rest = (head, tensors) if self._at_end else (head + size, len(answer))
        if not (answer.startswith(_GOOD) and answer[tensors : tensors + size] == self._right):
            self.give_up(f"a wrong answer: {bytes(answer[:600])!r}")
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
        """Ends the asking with an error."""
        if not self._done.done():
            self._done.set_exception(RuntimeError(why))


def _say(what: Any) -> None:
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.flush()


def main() -> None:
    """Asks what it is told on stdin, and tells what came on stdout."""
    told = pickle.load(sys.stdin.buffer)
    uvloop.run(_Caller(told).run())
