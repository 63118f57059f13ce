"""Accepts connections in one of several workers that share a socket, and balances them."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import sys
from collections.abc import Callable
from typing import Final

from qkv.telemetry.worker_state import WorkerState

_log = logging.getLogger(__name__)

_YIELD_S: Final = 0.002  # in which a worker with fewer connections can accept first
_RETRY_S: Final = 0.5  # after accept failed
_QUIET_S: Final = 5.0  # without a failure, before the log says that there are no more
_LACKS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OTHER_DESCRIPTORS: Final = 64  # of files and other sockets; a worker has 17 at rest


class Acceptor:
    """A listener that accepts one connection at a time.

    Otherwise the worker that wakes first would accept the whole backlog, and the others would idle.

    Args:
        listening: non-blocking socket that all workers share.
        worker: state of this worker, with the connection counts of all workers.
        new_protocol: creates the protocol of a connection.
        count_connections: returns the number of this worker's connections.
        close_longest_idle: closes a connection without a request; returns False if there is none.
    """

    def __init__(
        self,
        listening: socket.socket,
        worker: WorkerState,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        count_connections: Callable[[], int],
        close_longest_idle: Callable[[], bool],
    ) -> None:
        self._listening, self._worker = listening, worker
        self._new_protocol, self._count_connections = new_protocol, count_connections
        self._close_longest_idle = close_longest_idle
        self._max_connections = _max_connections()
        self._failures = _Failures()
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
        if self._count_connections() + len(self._connecting) >= self._max_connections:
            self._fail(OSError(errno.EMFILE, f"{self._max_connections} connections are open"))
            return
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or the client disconnected
        except OSError as error:
            self._fail(error)
            return
        connection.setblocking(False)
        connect = self._loop.connect_accepted_socket(self._new_protocol, connection)
        task = self._loop.create_task(connect)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._worker.set_connection_count(self._count_connections() + len(self._connecting))

    def _fail(self, error: OSError) -> None:
        """Accepts again later: soon if an idle connection could be closed to make room."""
        self._failures.add(error)
        has_room = error.errno in _LACKS and self._close_longest_idle()
        self._pause(_YIELD_S if has_room else _RETRY_S)


class _Failures:
    """The failures to accept a connection. The log has the first, and their count at the end."""

    def __init__(self) -> None:
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, error: OSError) -> None:
        """Counts a failure."""
        if self._timer is None:
            _log.error("cannot accept connections without closing idle ones: %s", error)
        else:
            self._timer.cancel()
        self._count += 1
        self._timer = asyncio.get_running_loop().call_later(_QUIET_S, self._end)

    def _end(self) -> None:
        _log.warning("connections are accepted again, after %d failures", self._count)
        self._count, self._timer = 0, None


def _max_connections() -> int:
    """Returns how many connections leave file descriptors for all else."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit - _OTHER_DESCRIPTORS)
