"""Accepts connections for one worker of several that share a socket, and leaves to the others what
they have fewer of."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from qkv.telemetry.worker_state import Worker

__all__ = ["Acceptor"]

_log = logging.getLogger("qkv.serve")

_TURN_S: Final = 0.002  # that a connection is left to workers that have fewer
_REST_S: Final = 0.5  # after accepting has failed, because there are no more file descriptors
# A machine that vanishes says no goodbye, and would hold its place for ever: after a minute without
# a word it is asked, six times at most, whether it is still there.
_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Acceptor:
    """Takes one connection at a time.

    Whoever is woken first would take all that wait, and answer them one after the other while the
    other workers idle.

    Args:
        listening: shared with the other workers; does not block.
        worker: says who has how many.
        protocol: makes what speaks to a connection.
        connections: says how many this worker has.
    """

    def __init__(
        self,
        listening: socket.socket,
        worker: Worker,
        protocol: Callable[[], asyncio.Protocol],
        connections: Callable[[], int],
    ) -> None:
        self._listening, self._worker = listening, worker
        self._protocol, self._connections = protocol, connections
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Accepts from now on."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._woken)

    def close(self) -> None:
        """Accepts no more."""
        self._loop.remove_reader(self._listening)
        if self._timer is not None:
            self._timer.cancel()

    def _woken(self) -> None:
        """Somebody knocks: first, if they like, at those with fewer connections."""
        self._worker.connections(self._connections() + len(self._connecting))
        if self._worker.has_more_than_others and not self._worker.fleet.draining:
            self._rest(_TURN_S)
        else:
            self._accept()

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(seconds, self._back)

    def _back(self) -> None:
        """Whoever still waits has waited long enough."""
        self._timer = None
        self._loop.add_reader(self._listening, self._woken)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or they left
        except OSError as error:
            _log.error("no connection can be accepted: %s", error)
            self._rest(_REST_S)
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _set_options(connection)
        made = self._loop.connect_accepted_socket(self._protocol, connection)
        task = self._loop.create_task(made)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._worker.connections(self._connections() + len(self._connecting))


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all three
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
