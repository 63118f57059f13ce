"""The port: a listening socket, and what a parent can do with it beside its workers' accepting."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import sys
from typing import Final

import click

from qkv.errors import NotNow
from qkv.wire import json

__all__ = ["close_door", "has_waiting", "listen", "refuse"]

_BACKLOG: Final = 2048
_REFUSALS: Final = 64  # at a time: clients may come back at once, for ever
_SO_ATTACH_FILTER: Final = 26  # of Linux's asm-generic/socket.h; Python has no name for it


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        click.ClickException: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: what can be no name, such as "a..b"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = (reason or "").partition(" (while attempting")[0]  # the address, once more
        where = f"[{host}]" if family == socket.AF_INET6 else host
        raise click.ClickException(f"cannot listen on {where}:{port}: {reason}") from None


def close_door(listening: socket.socket) -> None:
    """Ignores who knocks from now on; those already in the queue can still be accepted.

    Closing a socket resets what waits in its queue, and emptying the queue first leaves a gap
    between the two. A packet filter that lets nothing through (socket(7), SO_ATTACH_FILTER)
    closes the gap: a knock goes unanswered, and when it is repeated, a second later, the socket
    is closed and refuses it. Elsewhere than on Linux the gap stays.
    """
    if sys.platform == "linux":
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        with contextlib.suppress(OSError):  # some sandboxes know no such option
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def has_waiting(listening: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    return bool(select.select([listening], [], [], 0)[0])


def refuse(listening: socket.socket, detail: str) -> None:
    """Answers 503 to those who wait to be accepted: no worker does it any more."""
    answer = _refusal(detail)
    listening.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(_REFUSALS):
            connection, _address = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.2)
                connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                # closing over unread bytes would reset the connection before the answer is read
                while connection.recv(65536):
                    pass


def _refusal(detail: str) -> bytes:
    body = json.dump(NotNow(detail).problem())
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n"
        b"retry-after: 5\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
