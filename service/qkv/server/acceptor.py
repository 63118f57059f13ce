"""Accepts connections in one of several workers that share a socket, and balances them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from qkv.telemetry.worker_state import WorkerState

__all__ = ["Acceptor"]

_log = logging.getLogger(__name__)

_YIELD_S: Final = 0.002  # in which a worker with fewer connections can accept first
_RETRY_S: Final = 0.5  # after accept failed, such as for lack of file descriptors


class Acceptor:
    """A listener that accepts one connection at a time.

    Otherwise the worker that wakes first would accept the whole backlog, and the others would idle.

    Args:
        listening: non-blocking socket that all workers share.
        worker: state of this worker, with the connection counts of all workers.
        new_protocol: creates the protocol of a connection.
        count_connections: returns the number of this worker's connections.
    """

    def __init__(
        self,
        listening: socket.socket,
        worker: WorkerState,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        count_connections: Callable[[], int],
    ) -> None:
        self._listening, self._worker = listening, worker
        self._new_protocol, self._count_connections = new_protocol, count_connections
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Starts accepting."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._on_connection)

    def close(self) -> None:
        """Stops accepting."""
        self._loop.remove_reader(self._listening)
        if self._timer is not None:
            self._timer.cancel()

    def _on_connection(self) -> None:
        """Accepts a pending connection; first leaves it for 2 ms to a less loaded worker."""
        self._worker.set_connection_count(self._count_connections() + len(self._connecting))
        if self._worker.has_less_loaded_peer and not self._worker.shared_state.is_draining:
            self._pause(_YIELD_S)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(seconds, self._on_pause_end)

    def _on_pause_end(self) -> None:
        """Accepts the connection unless another worker has accepted it."""
        self._timer = None
        self._loop.add_reader(self._listening, self._on_connection)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or the client disconnected
        except OSError as error:
            _log.error("cannot accept connections: %s", error)
            self._pause(_RETRY_S)
            return
        connection.setblocking(False)
        connect = self._loop.connect_accepted_socket(self._new_protocol, connection)
        task = self._loop.create_task(connect)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._worker.set_connection_count(self._count_connections() + len(self._connecting))
