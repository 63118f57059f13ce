"""State of one request on the fast path."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from qkv.api.fast_path.run_cache import CachedRuns, Done, Header, RequestKey
from qkv.engine.admission import Admission

__all__ = ["PendingRequest", "ReadyBatch", "RequestHead"]

_log = logging.getLogger(__name__)

_LONGEST: Final = 4096  # bytes of a head that is kept, for each connection
_CACHED: Final = 1 << 18  # bytes of answers, beside what they are made of and with


class PendingRequest:
    """A request whose head the run cache knows, until its response or the ordinary path.

    Attributes:
        asked: what it says before its body.
        known: what is known of such requests.
        id: that it says it has.
        chunks: of its body.
        since: when it came, by `time.perf_counter`.
        unparsed: its first piece, where no parser has seen it.
        is_whole: its last byte is there.
        has_run: it has been run, or cannot be.
        done: what came of it.
        place: where it is counted, if it is waited for.
    """

    __slots__ = (
        "asked", "chunks", "done", "has_run", "id", "is_whole", "known", "place", "since",
        "unparsed",
    )  # fmt: skip

    def __init__(
        self, asked: RequestKey, known: CachedRuns, id: bytes | None, unparsed: bytes | None = None
    ) -> None:
        self.asked, self.known, self.id, self.unparsed = asked, known, id, unparsed
        self.chunks: list[bytes | memoryview] = []
        self.since = time.perf_counter()
        self.is_whole = self.has_run = False
        self.done: Done | None = None
        self.place: Admission | None = None


class RequestHead(NamedTuple):
    """The bytes of a request's head, and the parsed fields.

    Attributes:
        text: its bytes.
        length: of the whole request.
        headers: all of them.
    """

    text: bytes
    length: int
    asked: RequestKey
    known: CachedRuns
    id: bytes | None
    headers: list[Header]

    @classmethod
    def of(cls, data: bytes, short: PendingRequest, headers: list[Header]) -> RequestHead | None:
        """Returns the head of a request's first piece; None if it is incomplete or too long."""
        length = data.find(b"\r\n\r\n", 0, _LONGEST) + 4
        if length < 4 or length + sum(map(len, short.chunks)) != len(data):
            return None
        whole = length + short.asked.size
        return cls(data[:length], whole, short.asked, short.known, short.id, headers)


class Answering(Protocol):
    """A connection whose request is complete."""

    def run(self) -> int:
        """Runs the request once; returns the bytes of the tensors of its response."""

    def answer(self) -> None:
        """Sends the response once."""

    def abort(self) -> None:
        """Aborts the connection."""


class ReadyBatch:
    """Requests read in one poll of the network: runs all, then sends all responses.

    torch's code and the network's code evict each other from the CPU's caches. A batch has no more
    responses than such a cache holds.
    """

    def __init__(self) -> None:
        self._waiting: list[Answering] = []
        self._headers: Sequence[Header] = ()
        self._first = b""

    def first_lines(self, headers: Sequence[Header]) -> bytes:
        """Returns the first lines of a response; `headers` is a new object once a second."""
        if headers is not self._headers:
            self._headers = headers
            lines = [b"%b: %b\r\n" % header for header in headers]
            self._first = b"".join((b"HTTP/1.1 200 OK\r\n", *lines))
        return self._first

    def add(self, connection: Answering, loop: asyncio.AbstractEventLoop) -> None:
        """Adds a connection whose request is complete."""
        if not self._waiting:
            loop.call_soon(self._go)
        self._waiting.append(connection)

    def _go(self) -> None:
        waiting, self._waiting = self._waiting, []
        first = size = 0
        for i, connection in enumerate(waiting, start=1):
            size += connection.run()
            if size > _CACHED or i == len(waiting):
                for each in waiting[first:i]:
                    _answer(each)
                first, size = i, 0


def _answer(connection: Answering) -> None:
    try:
        connection.answer()
    except Exception:  # ends one connection, and keeps nobody else's answer
        _log.exception("an answer failed")
        connection.abort()
