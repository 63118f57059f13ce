"""Channels between workers and the device process: message frames on a socket pair.

A frame is a header (payload bytes, type, request id) and a payload without tensors. The supervisor
creates a socket pair for each worker, and sends one end to each side when either process starts.
It sends them through control sockets, which it creates before each fork. So there is no address
that another process could connect to, and each side sees at once that the other end closes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Final, NamedTuple, Self, cast

__all__ = ["Channel", "JobRequest", "MessageType", "SocketBroker", "receive_connection"]

_FRAME_HEADER: Final = struct.Struct("<IBQ")
_JOB_REQUEST: Final = struct.Struct("<QQQQBdd")
_NO_DEADLINE: Final = -1.0


class MessageType(IntEnum):
    """The type of a frame."""

    RUN = 1  # from the worker: run a job; the payload is a `JobRequest`
    CANCEL = 2  # from the worker: cancel the job
    READY = 3  # from the device process: it accepts jobs
    RESULT = 4  # from the device process: names and timing; outputs are in shared memory
    ERROR = 5  # from the device process: the job failed; the payload is the problem
    RELEASED = 6  # from the device process: it no longer reads a cancelled job's inputs


class JobRequest(NamedTuple):
    """A request to run a job.

    Attributes:
        inputs_offset: offset of its tensors in the worker's region.
        inputs_bytes: size of its tensors.
        outputs_offset: offset of the memory for its outputs.
        outputs_bytes: size of that memory.
        priority: as `Engine.submit` takes it.
        enqueued_at: time of submission, by `time.perf_counter`, one clock for all processes.
        wait_s: as `Engine.submit` takes it.
        header: as `job_codec.encode_header` returns it.
    """

    inputs_offset: int
    inputs_bytes: int
    outputs_offset: int
    outputs_bytes: int
    priority: int
    enqueued_at: float
    wait_s: float | None
    header: bytes

    def pack(self) -> bytes:
        """Returns the request as bytes."""
        *numbers, wait_s, header = self
        return _JOB_REQUEST.pack(*numbers, _NO_DEADLINE if wait_s is None else wait_s) + header

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Returns the request that `pack` encoded."""
        request = cls._make((*_JOB_REQUEST.unpack_from(data), data[_JOB_REQUEST.size :]))
        return request._replace(wait_s=None) if request.wait_s == _NO_DEADLINE else request


class Channel(asyncio.Protocol):
    """Sends and receives frames on one end of a socket pair.

    Args:
        on_message: called with the type, request id and payload of each frame.
        on_lost: called once when either end is closed.
    """

    def __init__(
        self,
        on_message: Callable[[MessageType, int, bytes], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""
        self.closed = asyncio.Event()

    async def open(self, end: socket.socket) -> Self:
        """Starts to send and receive on one end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport; asyncio calls it."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Handles complete frames and keeps the rest; asyncio calls it with any number of bytes."""
        data = self._rest + data
        first = 0
        while len(data) - first >= _FRAME_HEADER.size:
            size, kind, request_id = _FRAME_HEADER.unpack_from(data, first)
            end = first + _FRAME_HEADER.size + size
            if end > len(data):
                break
            payload = data[first + _FRAME_HEADER.size : end]
            self._on_message(MessageType(kind), request_id, payload)
            first = end
        self._rest = data[first:]

    def connection_lost(self, error: Exception | None) -> None:
        """Sets `closed`; asyncio calls it."""
        self.closed.set()
        self._on_lost()

    def send(self, kind: MessageType, request_id: int = 0, payload: bytes = b"") -> None:
        """Sends a frame; drops it if the other end is closed."""
        if self._transport is not None and not self._transport.is_closing():
            header = _FRAME_HEADER.pack(len(payload), kind, request_id)
            self._transport.write(header + payload)

    def close(self) -> None:
        """Closes the channel once all frames are sent; receives no more frames."""
        self._on_message = lambda kind, request_id, payload: None
        if self._transport is not None:
            self._transport.close()


class SocketBroker:
    """Connects workers and device process through their control sockets; for the supervisor.

    Args:
        device_process: its index; the workers have the indices below.
    """

    def __init__(self, device_process: int) -> None:
        self._device_process = device_process
        self._control_sockets: dict[int, socket.socket] = {}

    def create_control_socket(self, index: int) -> socket.socket:
        """Creates the control socket of the next process to fork; returns the process's end."""
        if index in self._control_sockets:
            self._control_sockets[index].close()
        self._control_sockets[index], child_end = socket.socketpair()
        return child_end

    def connect(self, index: int) -> None:
        """Connects a forked worker to the device process, or the device process to all workers."""
        workers = range(self._device_process)
        for worker in workers if index == self._device_process else [index]:
            if worker in self._control_sockets and self._device_process in self._control_sockets:
                self._send_pair(worker)

    def close(self) -> None:
        """Closes the supervisor's ends."""
        for control_socket in self._control_sockets.values():
            control_socket.close()

    def _send_pair(self, worker: int) -> None:
        name = worker.to_bytes(2)
        one, other = socket.socketpair()
        with one, other, suppress(OSError):  # the process has just ended: connected at its restart
            socket.send_fds(self._control_sockets[self._device_process], [name], [one.fileno()])
            socket.send_fds(self._control_sockets[worker], [name], [other.fileno()])


def receive_connection(control_socket: socket.socket) -> tuple[int, socket.socket] | None:
    """Receives a connection from a control socket that has something to read.

    Returns:
        The worker's index, and one end of a socket pair; None once the supervisor has exited.
    """
    name, ends, _, _ = socket.recv_fds(control_socket, 2, 1)
    return (int.from_bytes(name), socket.socket(fileno=ends[0])) if ends else None
