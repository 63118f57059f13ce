"""Connections of the API: read together, failing to write, not read from, idle, draining."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from qkv.api.request_body import TensorResponse
from qkv.jobs.job import Job
from support.engines import output_alone
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
    read_responses,
)
from support.raw_connection import server_jobs as server_jobs
from support.service import Server, running_server


@contextmanager
def paused_event_loop(server: Server) -> Iterator[None]:
    """Pauses the service's event loop, so that it reads together what is sent meanwhile."""
    is_paused, resume = threading.Event(), threading.Event()
    server.loop.call_soon_threadsafe(is_paused.set)
    server.loop.call_soon_threadsafe(resume.wait, TIMEOUT_S)
    assert is_paused.wait(TIMEOUT_S)
    try:
        yield
    finally:
        resume.set()


def test_response_that_cannot_be_written_breaks_no_other_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [random_inputs(seed) for seed in range(3)]
    write = TensorResponse.__call__

    async def fails(response: TensorResponse, scope: Any, receive: Any, send: Any) -> None:
        assert dict(scope["headers"])[b"x-request-id"] != b"1"
        await write(response, scope, receive, send)

    with ExitStack() as stack:
        callers = [stack.enter_context(raw_client(server)) for _ in every]
        monkeypatch.setattr(TensorResponse, "__call__", fails)
        with paused_event_loop(server):
            for i, (caller, arrays) in enumerate(zip(callers, every, strict=True)):
                body, length = encode_body(arrays)
                caller.send(encode_request(body, length, PATH, f"X-Request-ID: {i}"))
        assert callers[2].read_response()[2] == output_alone(every[2])
        assert callers[0].read_response()[2] == output_alone(every[0])
        with pytest.raises((AssertionError, ConnectionResetError)):  # 500, or closed
            callers[1].read_response()
    wait_until(lambda: in_flight_count(server) == 0)


def test_responses_that_are_not_read_do_not_fill_memory(
    server: Server, server_jobs: list[Job]
) -> None:
    """The service stops to run the requests of a client that reads no response."""
    shape = (1, 8, 64, 64)
    request = encode_request(*encode_body(random_inputs(0, shape)))
    size, many = 8 * 64 * 64 * 4, 400
    with raw_client(server) as caller:
        caller.send(request)
        first = caller.read_response()[2]
        caller.socket.settimeout(0.5)
        sent = 0
        try:
            for _ in range(many):
                caller.send(request)
                sent += 1
        except TimeoutError:  # the service reads no more either
            pass
        assert sent < many
        assert len(server_jobs) * size < 32 << 20
    assert first
    wait_until(lambda: in_flight_count(server) == 0)


@pytest.mark.slow
def test_idle_connection_is_closed_and_one_in_use_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    request, idle_s = encode_request(*encode_body(random_inputs(0))), 1.5
    with running_server(read_timeout_s=0.6) as server:
        assert server.uvicorn.config.timeout_keep_alive == 5  # seconds: too many for a test
        monkeypatch.setattr(server.uvicorn.config, "timeout_keep_alive", idle_s)
        with raw_client(server) as caller:
            started_at = time.monotonic()
            while time.monotonic() - started_at < idle_s + 0.5:
                caller.send(request)
                caller.read_response()
                time.sleep(0.1)
            used_at = time.monotonic()
            caller.send(request)
            caller.read_response()
            assert caller.socket.recv(1) == b""
            # by the idle timeout, not by that of reads; a slow machine can only add to it
            assert time.monotonic() - used_at > 0.8 * idle_s


@pytest.mark.parametrize("is_late", [False, True])
def test_last_response_of_a_draining_connection_closes_it(is_late: bool) -> None:
    """All requests that were received before it have responses."""
    request = encode_request(*encode_body(random_inputs(0)))
    with running_server() as server, raw_client(server) as caller:
        drain = server.runtime.worker.shared_state.drain
        with server.hold():
            if is_late:
                drain()
            caller.send(request * 3)
            wait_until(lambda: in_flight_count(server) == 1)
            drain()
        found = read_responses(caller.socket)
    assert [status for status, *_ in found] == [200] * 3
    assert ["connection" in headers for _, headers, _ in found] == [False] * (len(found) - 1) + [
        True
    ]


@pytest.mark.parametrize(("shape", "cut"), [((1, 2, 8, 16), 20), ((1, 8, 1024, 32), -1000)])
def test_request_that_arrives_in_part_is_the_last_of_a_drain(
    shape: tuple[int, ...], cut: int
) -> None:
    """It has a response, and none of those behind it, which a client could send for ever."""
    request = encode_request(*encode_body(random_inputs(0)))
    last = encode_request(*encode_body(random_inputs(0, shape)))
    with running_server() as server, raw_client(server) as caller:
        with server.hold():
            caller.send(request + last[:cut])
            wait_until(lambda: in_flight_count(server) == 1)
            server.runtime.worker.shared_state.drain()
            for connection in server.uvicorn.server_state.connections:
                server.loop.call_soon_threadsafe(connection.shutdown)
        headers, *_ = caller.read_response()
        assert "connection" not in headers
        caller.send(last[cut:] + request * 3)
        ((status, headers, _),) = read_responses(caller.socket)
    assert (status, headers["connection"]) == (200, "close")


def test_client_that_sends_after_the_last_response_can_read_it() -> None:
    """A connection that is closed over unread bytes is reset, and its response may be lost."""
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running_server() as server, raw_client(server) as caller:
        server.runtime.worker.shared_state.drain()
        caller.send(request)
        while b"}" not in caller.socket.recv(1 << 16, socket.MSG_PEEK):
            time.sleep(0.01)
        for _ in range(3):
            caller.send(request)
            time.sleep(0.05)
        assert [status for status, *_ in read_responses(caller.socket)] == [200]


@pytest.mark.parametrize(
    ("line", "status"),
    [("GET /v1/variants", 200), ("GET /readyz", 503), ("GET /none", 404), ("POST " + PATH, 400)],
)
def test_every_path_is_served_in_the_drain(line: str, status: int) -> None:
    with running_server() as server, raw_client(server) as caller:
        request = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
        caller.send(request)
        assert caller.status() in (status, 200)
        caller.rest()
        server.runtime.worker.shared_state.drain()
        caller.send(request)
        ((found, headers, _),) = read_responses(caller.socket)
        assert (found, headers["connection"]) == (status, "close")
