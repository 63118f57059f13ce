"""Times of one connection: silent and slow clients, and those that do not read."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import numpy as np
import pytest

from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    random_inputs,
    raw_client,
    read_responses,
)
from support.service import Server, running_server
from support.small_requests import open_connection

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

LIVE: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST: Final = b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n"
BODY: Final = b'{"inputs": {"query": [[1]], "key": [[1]], "value": [[1]]}}'
RUN: Final = POST + b"Content-Length: %d\r\n\r\n" % len(BODY)
IDLE_S: Final = 1  # after which a connection is closed, in place of the service's 5 s
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def short_read_timeout() -> Iterator[Server]:
    """Returns a service with a short read timeout."""
    with running_server(read_timeout_s=0.8) as server:
        yield server


@pytest.fixture(scope="module")
def server_with_write_timeout() -> Iterator[Server]:
    """Returns a service with a short write timeout."""
    with running_server(write_timeout_s=0.8) as server:
        yield server


@pytest.mark.slow
def test_silent_client_gets_408(
    short_read_timeout: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has sent before; with nothing to answer, its connection is only closed."""
    monkeypatch.setattr(short_read_timeout.uvicorn.config, "timeout_keep_alive", IDLE_S)
    incomplete = (b"G", LIVE[:-2], RUN, RUN + BODY[:10], CHUNKED + b"5\r\n1")
    expected: dict[bytes, list[int]] = {b"": [], b"\r\n": [], LIVE + b"\r\n": [200]}
    expected |= {sent: [408] for sent in incomplete}
    expected |= {LIVE + sent: [200, 408] for sent in (b"G", LIVE[:-2], RUN)}
    started_at = time.monotonic()
    with ExitStack() as stack:
        opened = [stack.enter_context(open_connection(short_read_timeout)) for _ in expected]
        for connection, sent in zip(opened, expected, strict=True):
            connection.sendall(sent)
        found = [[status for status, *_ in read_responses(each)] for each in opened]
    assert time.monotonic() - started_at > 0.5  # a slow machine can only add to it
    assert found == [*expected.values()]
    wait_until(lambda: short_read_timeout.runtime.worker.shared_state.in_flight == 0)


@pytest.mark.slow
def test_trickling_client_gets_408(short_read_timeout: Server) -> None:
    """The pieces are of a line, of a body, and of a body in chunks: three clients at a time."""
    pieces = {
        LIVE[:-2] + b"X: ": b" ",
        RUN.replace(b"Length: ", b"Length: 9"): b" ",
        CHUNKED: b"1\r\n \r\n",
    }
    received = dict.fromkeys(pieces, b"")
    with ExitStack() as stack:
        opened = {head: stack.enter_context(open_connection(short_read_timeout)) for head in pieces}
        for head, connection in opened.items():
            connection.settimeout(0.02)
            connection.sendall(head)
        started_at = time.monotonic()
        while not all(received.values()):
            assert time.monotonic() - started_at < TIMEOUT_S
            for head, connection in opened.items():
                if not received[head]:
                    with contextlib.suppress(TimeoutError):
                        received[head] = connection.recv(100)
                    with contextlib.suppress(ConnectionError):
                        connection.send(pieces[head])
    for head, answer in received.items():
        assert answer.startswith(b"HTTP/1.1 408 "), head


@pytest.mark.slow
def test_pauses_below_the_read_timeout_are_allowed(short_read_timeout: Server) -> None:
    body, length = encode_body(random_inputs(0))
    request = encode_request(body, length)
    with raw_client(short_read_timeout) as caller:
        for _ in range(6):  # each pause is shorter than the read timeout
            caller.send(request[: -len(body)])
            time.sleep(0.3)
            caller.send(body)
            caller.read_response()


@pytest.mark.slow
def test_slow_upload_with_progress_gets_its_response(short_read_timeout: Server) -> None:
    """A body takes longer than the read timeout, but each 64 KiB of it arrives in time."""
    request = encode_request(*encode_body(random_inputs(0, (1, 8, 128, 64))))
    with raw_client(short_read_timeout) as caller:
        for _ in range(2):
            for i in range(0, len(request), 100_000):
                caller.send(request[i : i + 100_000])
                time.sleep(0.15)
            caller.read_response()


@pytest.mark.slow
def test_read_timeout_does_not_count_while_queued(short_read_timeout: Server) -> None:
    with open_connection(short_read_timeout) as connection, short_read_timeout.hold():
        connection.sendall(RUN + BODY)
        short_read_timeout.wait_until_queued(1)
        time.sleep(1.5)
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
    with open_connection(short_read_timeout) as connection:
        connection.sendall(RUN + BODY + b"malformed\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [200, 400]


@contextlib.contextmanager
def short_write_timeout(server: Server) -> Iterator[socket.socket]:
    """Opens a connection with a small receive buffer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.settimeout(TIMEOUT_S)
        connection.connect(server.address)
        yield connection


def has(server: Server, connection: socket.socket) -> bool:
    """Returns True if the service still has the connection."""
    return connection.getsockname() in server.clients


def size_of(received: bytes) -> int:
    """Returns the size of a response in bytes, from its start."""
    head = received.partition(b"\r\n\r\n")[0]
    (size,) = re.findall(rb"\r\ncontent-length: (\d+)", head)
    return len(head) + 4 + int(size)


LARGE: Final = {  # a small request with a response of 16 MiB
    name: np.ones((1, 1, *shape), np.float32)
    for name, shape in {"query": (4096, 1), "key": (1, 1), "value": (1, 1024)}.items()
}


@pytest.mark.parametrize("line", ["Accept: */*", "Connection: close"])
def test_connection_with_an_unread_large_response_is_closed(
    server_with_write_timeout: Server, line: str
) -> None:
    with short_write_timeout(server_with_write_timeout) as connection:
        connection.sendall(encode_request(*encode_body(LARGE), PATH, line))
        received = connection.recv(100)
        assert received.startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: not has(server_with_write_timeout, connection))
        with contextlib.suppress(ConnectionResetError):  # after what the kernel had received
            while more := connection.recv(1 << 20):
                received += more
    assert len(received) < size_of(received)


@pytest.mark.slow
def test_connection_with_unread_small_responses_is_closed(
    server_with_write_timeout: Server,
) -> None:
    """A client that keeps sending requests and reads nothing is disconnected."""
    request = encode_request(*encode_body(random_inputs(0, (1, 1, 64, 64))))
    with short_write_timeout(server_with_write_timeout) as connection:
        connection.settimeout(0.05)

        def is_cut_off() -> bool:
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(16):
                    connection.send(request)
            return not has(server_with_write_timeout, connection)

        wait_until(lambda: has(server_with_write_timeout, connection))
        wait_until(is_cut_off)


def test_disconnect_cancels_pipelined_requests(short_read_timeout: Server) -> None:
    with short_read_timeout.hold():
        with open_connection(short_read_timeout) as connection:
            connection.sendall((RUN + BODY) * 2)
            short_read_timeout.wait_until_queued(1)
        short_read_timeout.wait_until_queued(0)


@pytest.mark.slow
def test_slow_reader_gets_its_response(server_with_write_timeout: Server) -> None:
    """Reads for several times the write timeout."""
    with short_write_timeout(server_with_write_timeout) as connection:
        connection.sendall(encode_request(*encode_body(LARGE)))
        started_at, received = time.monotonic(), b""
        while time.monotonic() < started_at + 2.5:
            received += connection.recv(1 << 15)
            time.sleep(0.05)
        assert len(received) < size_of(received)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        remaining = size_of(received) - len(received)
        while remaining:
            more = connection.recv(min(remaining, 1 << 20))
            assert more, "the connection was closed"
            remaining -= len(more)


@pytest.mark.slow
def test_slow_reader_is_not_idle(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open for longer than an idle one, and serves its next request."""
    monkeypatch.setattr(server.uvicorn.config, "timeout_keep_alive", IDLE_S)
    with short_write_timeout(server) as connection:
        connection.sendall(encode_request(*encode_body(LARGE)))
        started_at, received = time.monotonic(), b""
        while time.monotonic() < started_at + 2 * IDLE_S:
            received += connection.recv(1 << 12)
            time.sleep(0.05)
        assert len(received) < size_of(received)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        connection.sendall(LIVE + b"malformed\r\n\r\n")
        while more := connection.recv(1 << 20):
            received += more
    found = received[size_of(received) :]
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in found
