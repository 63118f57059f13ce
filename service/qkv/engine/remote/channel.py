"""What a worker and the device process say to one another: frames on a socket that they share.

A frame is a head (bytes that follow, kind, request) and what follows. No tensor is in it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, Self, cast

__all__ = ["Asked", "Channel", "Kind"]

_HEAD: Final = struct.Struct("<IBQ")
_ASKED: Final = struct.Struct("<QQQQBdd")
_NEVER: Final = -1.0


class Kind(IntEnum):
    """What a frame is."""

    ASK = 1  # worker: a job is to run; an `Asked` follows
    LEAVE = 2  # worker: its caller has left
    READY = 3  # device process: jobs are taken
    ANSWER = 4  # device process: timing and outputs' names; the outputs are in shared memory
    FAULT = 5  # device process: it failed, and why
    GONE = 6  # device process: it ran for nobody, or not at all


class Asked(NamedTuple):
    """A job that is to run.

    Attributes:
        inputs: where in the worker's region its tensors are.
        inputs_size: bytes of them.
        answer: where the answer's go.
        answer_size: bytes of them.
        priority: as `Engine.submit` takes it.
        since: when it was submitted, by `time.perf_counter`, one clock for every process.
        wait_s: as `Engine.submit` takes it.
        head: of its parcel.
    """

    inputs: int
    inputs_size: int
    answer: int
    answer_size: int
    priority: int
    since: float
    wait_s: float | None
    head: bytes

    def pack(self) -> bytes:
        """Itself as bytes."""
        *numbers, wait_s, head = self
        return _ASKED.pack(*numbers, _NEVER if wait_s is None else wait_s) + head

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """What was packed."""
        asked = cls._make((*_ASKED.unpack_from(data), data[_ASKED.size :]))
        return asked._replace(wait_s=None) if asked.wait_s == _NEVER else asked


class Channel(asyncio.Protocol):
    """One end.

    Args:
        take: told of each frame: kind, request, and what follows.
        lost: told, once, when the other end or this one is closed.
    """

    def __init__(
        self, take: Callable[[Kind, int, bytes], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        self._take, self._lost = take, lost
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""
        self.closed = asyncio.Event()

    async def open(self, end: socket.socket) -> Self:
        """Speaks through one end of a pair of sockets from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """asyncio's: any number of bytes."""
        data = self._rest + data
        first = 0
        while len(data) - first >= _HEAD.size:
            size, kind, request = _HEAD.unpack_from(data, first)
            end = first + _HEAD.size + size
            if end > len(data):
                break
            self._take(Kind(kind), request, data[first + _HEAD.size : end])
            first = end
        self._rest = data[first:]

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's."""
        self.closed.set()
        self._lost()

    def send(self, kind: Kind, request: int = 0, what: bytes = b"") -> None:
        """Sends a frame; into the void where the other end is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(len(what), kind, request) + what)

    def close(self) -> None:
        """Closes it once all is sent, and takes nothing more."""
        self._take = lambda kind, request, what: None
        if self._transport is not None:
            self._transport.close()
