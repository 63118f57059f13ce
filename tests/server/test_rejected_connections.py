"""Connections that the supervisor answers in place of the workers: no client makes it wait."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import pytest

from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import address, child_pids, refuses_connections, status_of

Command = Callable[..., Process]
CLIENTS: Final = 3
IMPATIENT: Final = """
from qkv.cli.main import main
from qkv.server import listener, supervisor
supervisor.BACKLOG_TIMEOUT_S = listener._LINGER_S = 0.5
main()
"""
"""A service that waits for workers to accept, and for rejected clients, for 0.5 s instead of 2."""


@pytest.fixture
def start(command: Command) -> Command:
    """Starts an impatient service with one worker, and other settings."""
    words = (IMPATIENT, "serve", "--port", "0", "--workers", "1")
    return partial(command, *words, module="support.forked_program")


@contextmanager
def slow_senders(process: Process) -> Iterator[Callable[[], bytes]]:
    """Runs clients that send a byte each 0.1 s for ever; yields a function that returns what they
    have received. A client whose connection ends connects again."""
    ended, received = threading.Event(), list[bytes]()

    def send_bytes(connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        connection.setblocking(False)
        while not ended.wait(0.1):
            with suppress(BlockingIOError):
                received.append(connection.recv(1 << 16))
            connection.send(b"a")

    def connect_again() -> None:
        while not ended.wait(0.01):
            with suppress(OSError), socket.create_connection(address(process), 1) as connection:
                send_bytes(connection)

    threads = [threading.Thread(target=connect_again) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: b"".join(received)
    finally:
        ended.set()
        for thread in threads:
            thread.join(TIMEOUT_S)


def test_killed_worker_is_replaced_beside_slow_senders(start: Command) -> None:
    # a new worker that has accepted a slow sender drains for the whole time: the sender never ends
    service = start(QKV_STUCK_S="1", QKV_DRAIN_S="1")
    assert status_of(service.url, "/livez") == 200
    (victim,) = child_pids(service.popen.pid)
    os.kill(victim, signal.SIGSTOP)
    with slow_senders(service) as received:
        wait_until(lambda: b"every worker is stuck" in received())
        assert status_of(service.url, "/livez") == 503
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: status_of(service.url, "/livez") == 200)
        assert child_pids(service.popen.pid) != [victim]
        assert service.end() == 0


def test_service_stops_beside_slow_senders(start: Command) -> None:
    """The supervisor rejects what the stopped worker does not accept."""
    service = start()
    assert service.url
    (worker,) = child_pids(service.popen.pid)
    os.kill(worker, signal.SIGSTOP)
    try:
        with slow_senders(service) as received:
            service.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: b"503 Service Unavailable" in received())
            os.kill(worker, signal.SIGCONT)
            assert service.wait() == 0
            assert refuses_connections(*address(service))
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
