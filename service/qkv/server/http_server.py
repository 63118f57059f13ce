"""The HTTP/1.1 server of one process: the state of its connections, and their periodic checks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp

from qkv.api.observability import RequestObserver
from qkv.errors import QkvError

__all__ = ["HttpServer", "OpenConnection"]

_KEEP_ALIVE_S: Final = 5.0  # without a request
_LINGER_S: Final = 2.0  # a client that sends while the connection closes would not see its response
_READ_BYTES: Final = 1 << 18
_CANCEL_S: Final = 2.0  # for the responses of requests that are cancelled


class OpenConnection(Protocol):
    """An open connection, as the server checks it.

    Attributes:
        client: address and port of the client.
    """

    client: tuple[str, int] | None

    def check(self) -> None:
        """Closes the connection if its client is too slow."""

    def close_when_idle(self) -> None:
        """Closes the connection once it has no request in progress."""

    def close_if_idle(self) -> bool:
        """Closes the connection unless it has a request in progress; returns True if it did."""


class HttpServer:
    """The state that the connections of an ASGI application share.

    It checks all connections periodically, so that a request needs no timer. It counts checks, not
    seconds, so that a paused process does not time out all its connections.

    Args:
        app: the application.
        observer: counts received bytes, and requests that do not reach the application.
        error_response: builds the response for an error at a path.
        is_draining: True once each connection may bring only one more request.
        read_timeout_s: seconds for a head, and for each 64 KiB of a body.
        write_timeout_s: seconds in which a client may read nothing of its responses.

    Attributes:
        app, observer, error_response, is_draining: as the arguments.
        connections: the open connections; the one that has been idle for longest comes first.
        tasks: those of the requests in progress.
        read_buffer: receives what a connection parses; each read ends before the next begins.
        date: the header Date with its end of line, at most a second old (RFC 9110, section 6.6.1).
        read_checks: number of checks after which a client sends too slowly.
        write_checks: number of checks after which a client reads too slowly.
        idle_checks: number of checks after which an idle connection is closed.
        linger_checks: number of checks after which a connection closed for writing is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        observer: RequestObserver,
        error_response: Callable[[QkvError, str], Response],
        is_draining: Callable[[], bool],
        read_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        self.app, self.observer, self.error_response = app, observer, error_response
        self.is_draining = is_draining
        self.connections: dict[OpenConnection, None] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self.date = b""
        self._period_s = min(1.0, read_timeout_s / 4, write_timeout_s / 4)
        self.read_checks = math.ceil(read_timeout_s / self._period_s)
        self.write_checks = math.ceil(write_timeout_s / self._period_s)
        self.idle_checks = math.ceil(_KEEP_ALIVE_S / self._period_s)
        self.linger_checks = math.ceil(_LINGER_S / self._period_s)
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()

    def add(self, connection: OpenConnection) -> None:
        """Adds an open connection to those that are checked."""
        self.connections[connection] = None
        if self._timer is None:
            self._begin_period()

    def remove(self, connection: OpenConnection) -> None:
        """Removes a closed connection."""
        self.connections.pop(connection, None)
        if not self.connections:
            self._all_closed.set()

    def begin_idle(self, connection: OpenConnection) -> None:
        """Makes a connection the last one to be closed for lack of file descriptors."""
        self.connections[connection] = self.connections.pop(connection)

    def close_longest_idle(self) -> bool:
        """Closes the connection without a request for longest; returns False if there is none."""
        return any(connection.close_if_idle() for connection in self.connections)

    async def drain(self, timeout_s: float) -> None:
        """Closes idle connections, and the others once they have their responses.

        Cancels the requests that are in progress after `timeout_s`.
        """
        for connection in list(self.connections):
            connection.close_when_idle()
        await self.until_closed(timeout_s)
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=_CANCEL_S)

    async def until_closed(self, timeout_s: float) -> None:
        """Waits until no connection is open and no request in progress, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self.connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
                if self.tasks:
                    await asyncio.wait(self.tasks)

    def _begin_period(self) -> None:
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._period_s, self._check_all)

    def _check_all(self) -> None:
        self._timer = None
        for connection in list(self.connections):
            connection.check()
        if self.connections:
            self._begin_period()
