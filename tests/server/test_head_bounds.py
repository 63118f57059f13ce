"""Memory of connections: bounded while a head arrives, and free once the connection has ended.

These tests hold for any HTTP server: they send bytes to sockets, and look at the resident memory of
a worker, or at the protocols and scopes that are alive in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from support.ports import free_port
from support.processes import TIMEOUT_S, Process, wait_until
from support.raw_connection import in_flight_count
from support.service import Server
from support.service_processes import TINY_BODY, address, child_pids, status_of

Command = Callable[..., Process]

CLIENTS: Final = 200
TINY_HEADERS: Final = b"a:\r\n" * 262_000  # 1 MiB, which took 30 MiB as Python objects
GET: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
POST: Final = b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (
    len(TINY_BODY),
    TINY_BODY,
)
BEFORE: Final = {"head": GET, "trailers": CHUNKED}
"""The bytes before the first of many headers, or of many trailers."""


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send(to: tuple[str, int], data: bytes) -> None:
    """Sends bytes on a new connection, which the service may close before it has all of them."""
    with (
        socket.create_connection(to, TIMEOUT_S) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)


def test_endless_heads_and_trailers_take_no_memory(command: Command) -> None:
    """On the port of the service and on that of metrics."""
    port = free_port()
    started = command("serve", "--port", "0", "--workers", "1", QKV_METRICS_PORT=str(port))
    every = [(to, b) for to in (address(started), ("127.0.0.1", port)) for b in BEFORE.values()]
    (worker,) = child_pids(started.popen.pid)
    assert status_of(started.url, "/livez") == 200
    resident_before = resident_bytes(worker)
    for to, before in every * (CLIENTS // len(every)):
        send(to, before + TINY_HEADERS)
    assert status_of(started.url, "/livez") == 200
    assert resident_bytes(worker) - resident_before < 32 << 20
    assert started.end() == 0


def test_pipelined_requests_take_no_memory(command: Command) -> None:
    """A client sends faster than it is served: its requests stay bytes until then."""
    started = command("serve", "--port", "0", "--workers", "1")
    assert status_of(started.url, "/livez") == 200
    (worker,) = child_pids(started.popen.pid)
    resident_before, data = resident_bytes(worker), (GET + b"\r\n") * 100_000
    with socket.create_connection(address(started), TIMEOUT_S) as connection:
        connection.settimeout(0.01)
        sent, received, deadline = 0, 0, time.monotonic() + 2
        while time.monotonic() < deadline and sent < len(data):
            with contextlib.suppress(TimeoutError):
                sent += connection.send(data[sent : sent + (1 << 18)])
            with contextlib.suppress(TimeoutError):
                received += len(connection.recv(1 << 20))
        assert sent > 1 << 20
        assert received
        assert resident_bytes(worker) - resident_before < 16 << 20
    assert status_of(started.url, "/livez") == 200
    assert started.end() == 0


@pytest.mark.parametrize("lines", [b"a:\r\n" * 110, b"a: %b\r\n" % (b"v" * 1000) * 70])
@pytest.mark.parametrize("part", BEFORE)
def test_error_comes_before_the_end_of_a_head(server: Server, part: str, lines: bytes) -> None:
    """Such a client has sent no end of its head, and does not close."""
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        connection.sendall(BEFORE[part] + lines)
        assert connection.recv(1 << 16).split()[1] == b"431"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Lets nothing but reference counts free an object."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive_count() -> int:
    """Returns the number of protocols and of HTTP scopes that are alive in this process."""
    count = 0
    for each in gc.get_objects():
        is_scope = type(each) is dict and "raw_path" in each
        count += is_scope or issubclass(type(each), asyncio.BaseProtocol)
    return count


def json_post(path: bytes, body: bytes) -> bytes:
    """Returns a request with a body in JSON."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


RUN: Final = json_post(b"/v1/attention/softmax", TINY_BODY)
SENT: Final = {
    "nothing": b"",
    "part of a head": GET + b"a: b\r\n" * 50,
    "too many headers": GET + b"a: b\r\n" * 150,
    "part of trailers": CHUNKED + b"a: b\r\n" * 50,
    "malformed": b"malformed\r\n\r\n",
    "GET": GET + b"\r\n",
    "upgrade": GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "unknown path": b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "run": RUN,
    "part of a body": RUN[:-10],
    "several runs": RUN * 5,
    "invalid run": json_post(b"/v1/attention/softmax", b"{}"),
    "stream": json_post(b"/v1/sweep", b'{"variants": ["mean"], "lengths": [2], "repeats": 1}'),
    "large response": json_post(
        b"/v1/attention/softmax",
        json.dumps(
            {
                "inputs": dict.fromkeys(("query", "key", "value"), [[0.5]] * 700),
                "outputs": ["weights"],
            }
        ).encode(),
    ),
}
"""The bytes that a client sends before it closes its connection."""


@pytest.mark.parametrize("has_read", [True, False])
def test_closed_connections_are_freed_without_a_collection(server: Server, has_read: bool) -> None:
    """Also if the client has not read its response, or closes before it."""

    def connect(sent: bytes) -> None:
        with (
            socket.create_connection(server.address, TIMEOUT_S) as connection,
            contextlib.suppress(ConnectionError),
        ):
            connection.sendall(sent)
            if has_read:
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

    server.http.get("/livez")
    for sent in SENT.values():  # what the first of its kind leaves, all others use
        connect(sent)
    wait_until(lambda: in_flight_count(server) == 0)
    with without_collections():
        before = alive_count()
        for sent in SENT.values():
            for _ in range(5):
                connect(sent)
        wait_until(lambda: alive_count() <= before)
