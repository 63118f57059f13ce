"""Looks at connections now and then, so that none is held for one who neither sends nor reads."""

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

__all__ = ["Watch", "untaken"]

_LINGER_S: Final = 2.0  # a caller that still sends when its connection is closed sees no answer


class _Watched(Protocol):
    """A connection that ends itself where it is late."""

    loop: asyncio.AbstractEventLoop

    def look(self) -> None:
        """Called every now and then."""


class Watch:
    """Ends connections on which what is to be read comes too slowly, or what is written is not
    taken.

    It looks at all of them now and then, so that a request costs it nothing, and counts how often
    it looked, not seconds: a process that was held up for long finds nobody late.

    Args:
        patience_s: seconds that a head may take, and each part of a body.
        unread_s: seconds in which a caller may take nothing of its answers.
    """

    def __init__(self, patience_s: float, unread_s: float) -> None:
        self.period = min(1.0, patience_s / 4, unread_s / 4)
        self.patience = math.ceil(patience_s / self.period)
        self.unread = math.ceil(unread_s / self.period)
        self.linger = math.ceil(_LINGER_S / self.period)
        self._open: set[_Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: _Watched) -> None:
        """From now on it looks at this one too."""
        self._open.add(connection)
        if self._timer is None:
            self._wait(connection.loop)

    def remove(self, connection: _Watched) -> None:
        """It is closed."""
        self._open.discard(connection)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self.period, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for connection in list(self._open):
            connection.look()
        if self._open:
            self._wait(loop)


def untaken(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has and the other side has not, where it tells (tcp(7), SIOCOUTQ): it
    takes more only after a third of a few megabytes has gone, which a slow reader needs long for.
    """
    if sys.platform != "linux":
        return 0
    count = array("i", [0])
    with suppress(OSError, ValueError):  # closed meanwhile
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return count[0]
