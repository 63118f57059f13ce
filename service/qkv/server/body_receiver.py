"""Receives the rest of a body from the socket directly into its final buffer.

The HTTP protocol makes a `BodyReceiver` the protocol of its transport during a large body.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["BodyReceiver", "BodyReceiverConnection"]


class BodyReceiverConnection(Protocol):
    """The connection whose body is received."""

    def on_bytes(self, count: int) -> None:
        """Handles a number of received bytes."""

    def on_complete(self) -> None:
        """Handles the end of the body."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the event as an asyncio protocol."""

    def eof_received(self) -> None:
        """Handles the event as an asyncio protocol."""

    def pause_writing(self) -> None:
        """Handles the event as an asyncio protocol."""

    def resume_writing(self) -> None:
        """Handles the event as an asyncio protocol."""


class BodyReceiver(asyncio.BufferedProtocol):
    """Protocol of a transport while it receives a body of known length.

    A parser would copy each piece twice: to `bytes`, and to the `bytes` of the body.

    Args:
        connection: owns the transport; gets all other events of it.
        buffer: the buffer to fill; not empty.
        done: resolved with True once the buffer is full, or with False if the client disconnected
            or the receiver was stopped.
    """

    def __init__(
        self,
        connection: BodyReceiverConnection,
        buffer: memoryview,
        done: asyncio.Future[bool],
    ) -> None:
        self._connection, self._buffer, self._done = connection, buffer, done
        self._filled_bytes = 0
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the rest of the buffer, so that no more bytes are read."""
        return self._buffer[self._filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Counts received bytes."""
        self._filled_bytes += nbytes
        self._connection.on_bytes(nbytes)
        if self._filled_bytes == len(self._buffer):
            self._connection.on_complete()
            self.end(True)

    def end(self, is_whole: bool) -> None:
        """Resolves `done` if it is still awaited."""
        if not self._done.done():
            self._done.set_result(is_whole)
