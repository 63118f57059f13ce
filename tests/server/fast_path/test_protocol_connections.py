"""Connections on the shortest way: answered together, broken, not read from, at rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from qkv.api.fast_path.run_cache import Reply, RunCache
from qkv.engine.executor import PreparedRun
from qkv.server.fast_path.pending_request import PendingRequest
from qkv.server.fast_path.protocol import FastPathProtocol
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    PATH,
    RawClient,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.raw_connection import fast_path_runs as fast_path_runs
from support.service import Server, running_server


def in_turn(callers: list[RawClient], requests: list[bytes]) -> list[bytes]:
    """Returns the response of each request when it runs alone."""
    answers = []
    for caller, request in zip(callers, requests, strict=True):
        caller.send(request)
        answers.append(caller.read_response()[2])
    return answers


@contextmanager
def asleep(server: Server) -> Iterator[None]:
    """The service's loop does not turn meanwhile: what is sent is read together."""
    assert server.engine._loop is not None
    held, go_on = threading.Event(), threading.Event()
    server.engine._loop.call_soon_threadsafe(held.set)
    server.engine._loop.call_soon_threadsafe(go_on.wait, TIMEOUT_S)
    assert held.wait(TIMEOUT_S)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize(("cached", "together"), [(None, 6), (2047, 2), (0, 1)])
def test_what_is_read_together_runs_together_and_is_answered_then(
    server: Server, monkeypatch: pytest.MonkeyPatch, cached: int | None, together: int
) -> None:
    """Each with its own numbers, though they lie in the same place one after the other; as many as
    a cache holds the answers of, which have 1,024 bytes each."""
    if cached is not None:
        monkeypatch.setattr("qkv.server.fast_path.pending_request._CACHED", cached)
    steps: list[str] = []
    for step in ("run", "reply"):
        method = getattr(RunCache, step)

        def noted(*args: Any, step: str = step, method: Any = method) -> Any:
            steps.append(step)
            return method(*args)

        monkeypatch.setattr(RunCache, step, noted)
    requests = [encode_request(*encode_body(random_inputs(seed))) for seed in range(6)]
    with ExitStack() as stack:
        callers = [stack.enter_context(raw_client(server)) for _ in requests]
        alone = in_turn(callers, requests)
        steps.clear()
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert [caller.read_response()[2] for caller in callers] == alone
    assert steps == (["run"] * together + ["reply"] * together) * (len(requests) // together)


def test_an_answer_that_cannot_be_written_costs_one_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of those that are answered with it."""
    requests = [
        encode_request(*encode_body(random_inputs(seed)), PATH, f"X-Request-ID: {seed}")
        for seed in range(3)
    ]
    write = FastPathProtocol._write

    def fails(protocol: FastPathProtocol, short: PendingRequest, reply: Reply) -> None:
        assert short.id != b"1"
        write(protocol, short, reply)

    with ExitStack() as stack:
        callers = [stack.enter_context(raw_client(server)) for _ in requests]
        alone = in_turn(callers, requests)
        monkeypatch.setattr(FastPathProtocol, "_write", fails)
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert callers[2].read_response()[2] == alone[2]
        assert callers[0].read_response()[2] == alone[0]
        with pytest.raises((AssertionError, ConnectionResetError)):  # closed
            callers[1].read_response()
    wait_until(lambda: in_flight_count(server) == 0)


def test_answers_that_nobody_reads_are_not_heaped_up(
    server: Server, fast_path_runs: list[PreparedRun]
) -> None:
    """A caller that asks on without reading is not answered at once any more."""
    shape = (1, 8, 64, 64)
    request = encode_request(*encode_body(random_inputs(0, shape)))
    size, many = 8 * 64 * 64 * 4, 200
    with raw_client(server) as caller:
        caller.send(request)
        first = caller.read_response()[2]
        caller.socket.settimeout(0.5)
        sent = 0
        try:
            for _ in range(many):
                caller.send(request)
                sent += 1
        except TimeoutError:  # nobody reads us either: as it should be
            pass
        assert sent < many
        heaped = len(fast_path_runs) * size
        assert heaped < 32 << 20
    assert first
    wait_until(lambda: in_flight_count(server) == 0)


@pytest.mark.slow
def test_a_connection_at_rest_is_closed_and_one_in_use_is_not() -> None:
    """uvicorn's time to ask again holds where answers go the shortest way too."""
    with running_server(read_timeout_s=0.8) as server, raw_client(server) as caller:
        request = encode_request(*encode_body(random_inputs(0)))
        caller.send(request)
        caller.read_response()
        (connection,) = server.timeouts._connections
        connection.timeout_keep_alive = 1
        begun = time.monotonic()
        while time.monotonic() - begun < 2:
            caller.send(request)
            caller.read_response()
            time.sleep(0.1)
        rested = time.monotonic()
        assert caller.socket.recv(1) == b""
        assert time.monotonic() - rested > 0.9
