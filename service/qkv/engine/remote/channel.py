"""Channels between workers and device processes: messages on a socket pair.

The supervisor creates a socket pair for each worker and device process, and sends one end to each
side when either process starts. It sends them through control sockets, which it creates before each
fork. So there is no address that another process could connect to, and each side sees at once that
the other process has ended, and what was on the way between them ends with it. Pairs that the
supervisor made once and kept would stay open when a process dies: the other side would wait for its
answer, and the process that replaces it would read the rest of a message.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Self, cast

import msgpack

from qkv.engine.remote.messages import MessageType

_ANY_SIZE: Final = 0  # of what is not read yet: both processes are the service's


class Channel(asyncio.Protocol):
    """One end of a socket pair that sends and receives messages.

    Args:
        on_message: called with the type and the parts of each message.
        on_lost: called once when either end is closed.
    """

    def __init__(
        self,
        on_message: Callable[[MessageType, tuple[Any, ...]], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._pack = msgpack.Packer().pack
        self._unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=_ANY_SIZE)
        self.closed = asyncio.Event()

    async def open(self, end: socket.socket) -> Self:
        """Starts to send and receive on one end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport; asyncio calls it."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Handles complete messages; asyncio calls it with any number of bytes."""
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._on_message(message[0], message[1:])

    def connection_lost(self, error: Exception | None) -> None:
        """Sets `closed`; asyncio calls it."""
        self.closed.set()
        self._on_lost()

    def send(self, kind: MessageType, *parts: Any) -> None:
        """Sends a message; drops it if the other end is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._pack((kind, *parts)))

    def close(self) -> None:
        """Closes the channel once all messages are sent; receives no more."""
        self._on_message = lambda kind, parts: None
        if self._transport is not None:
            self._transport.close()


class SocketBroker:
    """The supervisor's side of the control sockets: connects workers and device processes.

    Args:
        workers: number of workers; the device processes have the indices above theirs.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._control_sockets: dict[int, socket.socket] = {}

    def create_control_socket(self, index: int) -> socket.socket:
        """Creates the control socket of the next process to fork; returns the process's end."""
        if index in self._control_sockets:
            self._control_sockets[index].close()
        own_end, child_end = socket.socketpair()
        own_end.setblocking(False)  # a process that is stopped must not stop the supervisor
        self._control_sockets[index] = own_end
        return child_end

    def connect(self, index: int) -> None:
        """Connects a forked worker to all device processes, or a device process to all workers."""
        is_worker = index < self._workers
        for other in self._control_sockets:
            if (other < self._workers) != is_worker:
                self._send_pair(*(index, other) if is_worker else (other, index))

    def close(self) -> None:
        """Closes the supervisor's ends."""
        for control_socket in self._control_sockets.values():
            control_socket.close()

    def _send_pair(self, worker: int, device: int) -> None:
        """Sends one end of a socket pair to each, with the number of the other process."""
        sockets, number = self._control_sockets, device - self._workers
        one, other = socket.socketpair()
        with one, other, suppress(OSError):  # the process has just ended: connected at its restart
            socket.send_fds(sockets[device], [worker.to_bytes(2)], [one.fileno()])
            socket.send_fds(sockets[worker], [number.to_bytes(2)], [other.fileno()])


def receive_connection(control_socket: socket.socket) -> tuple[int, socket.socket] | None:
    """Receives a connection from a control socket that has something to read.

    Returns:
        The worker's index, or the device process's number, and one end of a socket pair; None once
        the supervisor has exited.
    """
    name, ends, _, _ = socket.recv_fds(control_socket, 2, 1)
    return (int.from_bytes(name), socket.socket(fileno=ends[0])) if ends else None
