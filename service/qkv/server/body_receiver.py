"""Receives the rest of a body from the socket into its final buffer, without a copy between."""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["BodyReceiver", "BodyReceiverConnection"]


class BodyReceiverConnection(Protocol):
    """A connection whose body is received."""

    def on_bytes(self, count: int) -> None:
        """Called with the count of bytes received."""

    def on_complete(self) -> None:
        """Called once the body is complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As a protocol's."""

    def eof_received(self) -> None:
        """As a protocol's."""

    def pause_writing(self) -> None:
        """As a protocol's."""

    def resume_writing(self) -> None:
        """As a protocol's."""


class BodyReceiver(asyncio.BufferedProtocol):
    """A transport's protocol while only a body of a known length is received.

    A parser would copy each piece twice: to `bytes`, and to the `bytes` of a body.

    Args:
        connection: whose transport it is; gets all its other events.
        buffer: to be filled, not empty.
        done: resolved with whether it was; false: the client disconnected, or the receiver was
            stopped. None: nothing waits for it.
    """

    def __init__(
        self,
        connection: BodyReceiverConnection,
        buffer: memoryview,
        done: asyncio.Future[bool] | None = None,
    ) -> None:
        self._connection, self._buffer, self._done = connection, buffer, done
        self._filled_bytes = 0
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    @property
    def received(self) -> memoryview:
        """The part of the body that was received."""
        return self._buffer[: self._filled_bytes]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the rest of the buffer: more is not read."""
        return self._buffer[self._filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Counts bytes that were received."""
        self._filled_bytes += nbytes
        self._connection.on_bytes(nbytes)
        if self._filled_bytes == len(self._buffer):
            self._connection.on_complete()
            self.end(True)

    def end(self, is_whole: bool) -> None:
        """Resolves `done`, if something still waits for it."""
        if self._done is not None and not self._done.done():
            self._done.set_result(is_whole)
