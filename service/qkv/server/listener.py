"""The listening socket: binds it, and stops accepting without resetting connections.

The workers accept from the socket. In their place the supervisor rejects connections while all of
them are stuck, and those that none has accepted before the service stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import select
import socket
import struct
import sys
import time
from typing import Final

import click

from qkv.errors import ServiceUnavailable
from qkv.wire import json

_BACKLOG: Final = 2048
_MAX_REJECTED: Final = 64  # open ones, since clients may reconnect at once for ever
_LINGER_S: Final = 2.0  # for the client of a rejected connection to close it
_DISCARDED_BYTES: Final = 1 << 22  # of a connection, each time the supervisor looks
# A client whose machine has vanished never closes its connection. The kernel probes it after a
# minute of silence, and closes the connection after six probes without a reply.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_MAX_INT: Final = 2**31 - 1
_SO_ATTACH_FILTER: Final = 26  # of Linux's asm-generic/socket.h; Python has no name for it
_DROP_SYNS: Final = (  # BPF: code, jumps if true and false, operand
    (0x30, 0, 0, 13),  # load the byte of flags in the TCP header, RFC 9293, section 3.1
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # a SYN without ACK
    (0x06, 0, 0, 0),  # is dropped
    (0x06, 0, 0, 0xFFFFFFFF),  # another packet passes whole
)


def listen(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """Returns a listening socket, whose connections inherit its options.

    Args:
        host, port: its address.
        write_timeout_s: seconds after which the kernel resets a connection whose client reads
            nothing (tcp(7), TCP_USER_TIMEOUT). Only Linux has the option.

    Raises:
        click.ClickException: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    timeout_ms = min(math.ceil(write_timeout_s * 1e3), _MAX_INT)
    options = {"TCP_NODELAY": 1, "TCP_USER_TIMEOUT": timeout_ms, **_KEEPALIVE}
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                listening.setsockopt(socket.IPPROTO_TCP, option, value)
        return listening
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name, such as "a..b"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = (reason or "").partition(" (while attempting")[
            0
        ]  # omits the address, which the message has
        where = f"[{host}]" if family == socket.AF_INET6 else host
        raise click.ClickException(f"cannot listen on {where}:{port}: {reason}") from None


def stop_accepting(listening: socket.socket) -> None:
    """Drops new SYNs; connections already in the backlog can still be accepted.

    Closing a socket resets the connections in its backlog; emptying the backlog first leaves a gap
    before the close. A packet filter that drops SYNs (socket(7), SO_ATTACH_FILTER) closes the gap.
    Their repetition a second later meets a closed socket, which refuses them. The ACK that ends a
    handshake passes: without it, the client would write to a connection that is reset later. On
    systems other than Linux the gap stays. With six clients that connected all the time, it reset
    connections in 2 of 120 stops, and the filter none in 120.
    """
    if sys.platform == "linux":
        drop_syns = ctypes.create_string_buffer(
            b"".join(struct.pack("HBBI", *x) for x in _DROP_SYNS)
        )
        program = struct.pack("HL", len(_DROP_SYNS), ctypes.addressof(drop_syns))
        with contextlib.suppress(OSError):  # some sandboxes lack the option
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def has_pending(listening: socket.socket) -> bool:
    """Returns True if a connection is in the backlog."""
    return bool(select.select([listening], [], [], 0)[0])


class Rejections:
    """The connections that the supervisor accepts and answers with 503, in place of the workers.

    Nothing that a client sends or does not read makes the supervisor wait: each call takes what is
    there. A connection stays open until its client has closed it, at most `_LINGER_S`, because
    closing over unread bytes would reset it before its response is read.
    """

    def __init__(self) -> None:
        self._close_at: dict[socket.socket, float] = {}  # time, by connection

    def __bool__(self) -> bool:
        """True if a connection is open."""
        return bool(self._close_at)

    def accept(self, listening: socket.socket, error: ServiceUnavailable) -> None:
        """Accepts the connections in the backlog, as long as not too many are open."""
        response = _encode_503(error)
        listening.setblocking(False)
        with contextlib.suppress(OSError):  # none is left, or no file descriptor is
            while len(self._close_at) < _MAX_REJECTED:
                connection, _ = listening.accept()
                connection.setblocking(False)
                self._close_at[connection] = time.monotonic() + _LINGER_S
                with contextlib.suppress(OSError):  # the client has closed it
                    connection.send(response)
                    connection.shutdown(socket.SHUT_WR)

    def discard_received(self) -> None:
        """Discards what the clients have sent; closes the connections that have ended."""
        for connection, close_at in list(self._close_at.items()):
            if time.monotonic() > close_at or _has_ended(connection):
                del self._close_at[connection]
                connection.close()

    def close(self) -> None:
        """Closes all connections, in a forked process its copies of them."""
        while self._close_at:
            self._close_at.popitem()[0].close()


def _has_ended(connection: socket.socket) -> bool:
    """Discards a bounded part of what a client has sent; returns True if that was the last."""
    try:
        return not connection.recv(_DISCARDED_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _encode_503(error: ServiceUnavailable) -> bytes:
    body = json.dump(error.problem())
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n"
        b"retry-after: 5\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
