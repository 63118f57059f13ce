"""The progress of a client: what it has sent and read between two checks of its connection."""

from __future__ import annotations

import asyncio
import sys
from array import array
from contextlib import suppress
from typing import Final

if sys.platform == "linux":
    import fcntl
    import termios

__all__ = ["ClientProgress"]

_PROGRESS_BITS: Final = 16  # 1 << 16 bytes of a body must arrive within the read timeout


class ClientProgress:
    """A count of the checks of a connection in which its client has made no progress.

    Attributes:
        has_drained: set when the client has read most of what was written.
    """

    def __init__(self) -> None:
        self.has_drained = False
        self._seen: tuple[int, int] | None = None
        self._slow_checks = self._idle_checks = self._unread_checks = self._unsent_bytes = 0

    def begin_request(self) -> None:
        """Begins to count anew: the client has time for its next request."""
        self._seen = None
        self._slow_checks = self._idle_checks = 0

    def is_idle_for(self, checks: int) -> bool:
        """Counts a check without a request; returns True if there were more than `checks`."""
        self._idle_checks += 1
        return self._idle_checks > checks

    def is_slow(self, message: int, received_bytes: int, checks: int, is_due: bool) -> bool:
        """Counts a check of a request; returns True after `checks` without progress.

        Args:
            message: number of the request.
            received_bytes: bytes received of its body, and before.
            checks: the limit.
            is_due: the client must send something.
        """
        before, self._seen = self._seen, (message, received_bytes >> _PROGRESS_BITS)
        has_moved = before != self._seen
        self._slow_checks = self._slow_checks + 1 if is_due and not has_moved else 0
        if self._slow_checks < checks:
            return False
        self._slow_checks = 0
        return True

    def is_unread(self, transport: asyncio.Transport, checks: int) -> bool:
        """Counts a check; returns True if the client has read nothing in the last `checks`.

        Added bytes hide no progress: few are added until the buffer has drained.
        """
        before, self._unsent_bytes = self._unsent_bytes, transport.get_write_buffer_size()
        if self._unsent_bytes:
            self._unsent_bytes += _bytes_in_kernel(transport)
        moves = not before or self._unsent_bytes < before or self.has_drained
        self._unread_checks = 0 if moves else self._unread_checks + 1
        self.has_drained = False
        return self._unread_checks >= checks


def _bytes_in_kernel(transport: asyncio.Transport) -> int:
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
