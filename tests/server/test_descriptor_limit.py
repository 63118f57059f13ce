"""The limit of file descriptors: idle connections make room, and the log says it once."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Final

import pytest

from support.ports import free_port
from support.processes import TIMEOUT_S, Process, running_command, wait_until
from support.service_processes import PATH, TINY_BODY, address, status_of

LIMIT: Final = 256
SOON_QUIET: Final = """
from qkv.cli.main import main
from qkv.server import acceptor
acceptor._QUIET_S = 1.0
main()
"""
"""A service that takes failures for over after one second, two of its attempts, not after five."""
LIVE: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST: Final = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
    PATH.encode(),
    len(TINY_BODY),
)


@contextmanager
def descriptor_limit(count: int) -> Iterator[None]:
    """Sets the limit that processes inherit which the block starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def service() -> Iterator[Process]:
    """Returns a service with one worker and few descriptors."""
    words, metrics_port = ("serve", "--port", "0", "--workers", "1"), str(free_port())
    with ExitStack() as stack:
        with descriptor_limit(LIMIT):
            running = running_command(
                SOON_QUIET, *words, module="support.forked_program", QKV_METRICS_PORT=metrics_port
            )
            started = stack.enter_context(running)
            assert started.url
        yield started
        assert started.end() == 0


def connect(to: tuple[str, int], data: bytes) -> socket.socket:
    connection = socket.create_connection(to, TIMEOUT_S)
    with suppress(ConnectionError):  # closed already
        connection.sendall(data)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", LIVE[:-2], LIVE], ids=["nothing", "part of a head", "idle"])
def test_idle_connections_make_room_for_others(service: Process, data: bytes) -> None:
    """A connection with a request in progress is not closed for them."""
    before = len(service.lines)
    with ExitStack() as stack:
        busy = stack.enter_context(closing(connect(address(service), POST + TINY_BODY[:-1])))
        for _ in range(8):
            for _ in range(LIMIT // 4):
                stack.enter_context(closing(connect(address(service), data)))
            assert status_of(service.url, "/livez") == 200
        assert status_of(service.url, "/metrics") == 200  # reads files
        busy.sendall(TINY_BODY[-1:])
        assert busy.recv(1 << 16).split()[1] == b"200"
    wait_until(lambda: "connections are accepted again" in service.lines[-1])
    lines = service.lines[before:]
    assert len(lines) == 2, lines
    assert "cannot accept connections" in lines[0]
    assert int(lines[1].split()[-2]) > LIMIT


@pytest.mark.slow
def test_busy_connections_beyond_the_limit_are_reported_once(service: Process) -> None:
    """There is nothing to close: others wait until a request has ended."""
    before = len(service.lines)
    with closing(socket.socket()) as late:
        with ExitStack() as stack:
            for _ in range(LIMIT):
                stack.enter_context(closing(connect(address(service), POST)))
            wait_until(lambda: "cannot accept connections" in service.lines[-1])
            late.connect(address(service))
            late.sendall(LIVE)
            late.settimeout(1.5)  # three more failures
            with pytest.raises(TimeoutError):
                late.recv(1)
        late.settimeout(TIMEOUT_S)
        assert late.recv(1 << 16).split()[1] == b"200"
    wait_until(lambda: "connections are accepted again" in service.lines[-1])
    assert len(service.lines) - before == 2
