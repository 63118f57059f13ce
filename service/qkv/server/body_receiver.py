"""The rest of a body on its way from the socket to where it belongs, with no copy in between."""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["Filled", "Filling"]


class Filled(Protocol):
    """A connection that has a body filled."""

    def took(self, count: int) -> None:
        """So many bytes of the body came."""

    def filled(self) -> None:
        """All of it is there."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As a protocol's."""

    def eof_received(self) -> None:
        """As a protocol's."""

    def pause_writing(self) -> None:
        """As a protocol's."""

    def resume_writing(self) -> None:
        """As a protocol's."""


class Filling(asyncio.BufferedProtocol):
    """A transport's protocol while nothing but a body of a known length is to come.

    A parser would have each piece copied twice before it is where it belongs: when it is made
    `bytes`, and when it is made `bytes` of a body.

    Args:
        connection: whose transport it is, told of all that happens on it.
        buffer: to be filled, not empty.
        done: told whether it was; false: the caller left, or nobody listens any more. None: nobody
            waits.
    """

    def __init__(
        self, connection: Filled, buffer: memoryview, done: asyncio.Future[bool] | None = None
    ) -> None:
        self._connection, self._buffer, self._done = connection, buffer, done
        self._filled = 0
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    @property
    def came(self) -> memoryview:
        """What is there of it."""
        return self._buffer[: self._filled]

    def get_buffer(self, sizehint: int) -> memoryview:
        """All that is left: more is not read."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        self._filled += nbytes
        self._connection.took(nbytes)
        if self._filled == len(self._buffer):
            self._connection.filled()
            self.end(True)

    def end(self, is_whole: bool) -> None:
        """Tells whoever waits, if it still does."""
        if self._done is not None and not self._done.done():
            self._done.set_result(is_whole)
