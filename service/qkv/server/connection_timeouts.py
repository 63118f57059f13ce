"""Closes connections whose client sends or reads too slowly, or that are idle.

One `ConnectionTimeouts` checks all connections of a worker.
"""

from __future__ import annotations

import asyncio
import math
import sys
from array import array
from contextlib import suppress
from typing import Final, Protocol

if sys.platform == "linux":
    import fcntl
    import termios

__all__ = ["ConnectionTimeouts", "unsent_bytes"]

_LINGER_S: Final = 2.0  # a client that sends while the connection closes would not see its response


class _Checked(Protocol):
    """A connection that closes itself if its client is too slow."""

    loop: asyncio.AbstractEventLoop

    def check(self) -> None:
        """Checks the client; called once every `period_s`."""


class ConnectionTimeouts:
    """Checks all connections periodically, so that a request needs no timer.

    Counts checks, not seconds, so that a paused process does not time out all its connections.

    Args:
        read_timeout_s: seconds for a head, and for each 64 KiB of a body.
        write_timeout_s: seconds in which a client may read nothing of its responses.

    Attributes:
        connections: the open connections.
        period_s: seconds between two checks.
        read_checks: number of checks after which a client sends too slowly.
        write_checks: number of checks after which a client reads too slowly.
        linger_checks: number of checks after which a connection closed for writing is closed.
    """

    def __init__(self, read_timeout_s: float, write_timeout_s: float) -> None:
        self.period_s = min(1.0, read_timeout_s / 4, write_timeout_s / 4)
        self.read_checks = math.ceil(read_timeout_s / self.period_s)
        self.write_checks = math.ceil(write_timeout_s / self.period_s)
        self.linger_checks = math.ceil(_LINGER_S / self.period_s)
        self.connections: set[_Checked] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: _Checked) -> None:
        """Adds a connection to those that are checked."""
        self.connections.add(connection)
        if self._timer is None:
            self._schedule(connection.loop)

    def remove(self, connection: _Checked) -> None:
        """Removes a closed connection."""
        self.connections.discard(connection)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self.period_s, self._check_all, loop)

    def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for connection in list(self.connections):
            connection.check()
        if self.connections:
            self._schedule(loop)


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Returns the number of bytes in the kernel's send buffer; 0 on systems other than Linux.

    Only this count (tcp(7), SIOCOUTQ) shows the progress of a slow reader. The kernel accepts more
    bytes only after a third of its buffer of a few megabytes is free.
    """
    if sys.platform != "linux":
        return 0
    count = array("i", [0])
    with suppress(OSError, ValueError):  # the connection is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return count[0]
