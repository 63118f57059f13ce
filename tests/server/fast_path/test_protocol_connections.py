"""Connections on the shortest way: answered together, broken, not read from, at rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from conftest import PATIENCE, Server, serving, until
from qkv.api.fast_path.run_cache import Reply, Shortcuts
from qkv.engine.executor import Standing
from qkv.server.fast_path.pending_request import Short
from qkv.server.fast_path.protocol import Protocol
from support.raw_connection import PATH, Caller, asked_of, body_of, calling, drawn, request_of
from support.raw_connection import ran as ran


def in_turn(callers: list[Caller], requests: list[bytes]) -> list[bytes]:
    """What each is answered by itself."""
    answers = []
    for caller, request in zip(callers, requests, strict=True):
        caller.send(request)
        answers.append(caller.answer()[2])
    return answers


@contextmanager
def asleep(server: Server) -> Iterator[None]:
    """The service's loop does not turn meanwhile: what is sent is read together."""
    assert server.engine._loop is not None
    held, go_on = threading.Event(), threading.Event()
    server.engine._loop.call_soon_threadsafe(held.set)
    server.engine._loop.call_soon_threadsafe(go_on.wait, PATIENCE)
    assert held.wait(PATIENCE)
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
        method = getattr(Shortcuts, step)

        def noted(*args: Any, step: str = step, method: Any = method) -> Any:
            steps.append(step)
            return method(*args)

        monkeypatch.setattr(Shortcuts, step, noted)
    requests = [request_of(*body_of(drawn(seed))) for seed in range(6)]
    with ExitStack() as stack:
        callers = [stack.enter_context(calling(server)) for _ in requests]
        alone = in_turn(callers, requests)
        steps.clear()
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert [caller.answer()[2] for caller in callers] == alone
    assert steps == (["run"] * together + ["reply"] * together) * (len(requests) // together)


def test_an_answer_that_cannot_be_written_costs_one_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of those that are answered with it."""
    requests = [
        request_of(*body_of(drawn(seed)), PATH, f"X-Request-ID: {seed}") for seed in range(3)
    ]
    write = Protocol._write

    def fails(protocol: Protocol, short: Short, reply: Reply) -> None:
        assert short.id != b"1"
        write(protocol, short, reply)

    with ExitStack() as stack:
        callers = [stack.enter_context(calling(server)) for _ in requests]
        alone = in_turn(callers, requests)
        monkeypatch.setattr(Protocol, "_write", fails)
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert callers[2].answer()[2] == alone[2]
        assert callers[0].answer()[2] == alone[0]
        with pytest.raises((AssertionError, ConnectionResetError)):  # closed
            callers[1].answer()
    until(lambda: asked_of(server) == 0)


def test_answers_that_nobody_reads_are_not_heaped_up(server: Server, ran: list[Standing]) -> None:
    """A caller that asks on without reading is not answered at once any more."""
    shape = (1, 8, 64, 64)
    request = request_of(*body_of(drawn(0, shape)))
    size, many = 8 * 64 * 64 * 4, 200
    with calling(server) as caller:
        caller.send(request)
        first = caller.answer()[2]
        caller.socket.settimeout(0.5)
        sent = 0
        try:
            for _ in range(many):
                caller.send(request)
                sent += 1
        except TimeoutError:  # nobody reads us either: as it should be
            pass
        assert sent < many
        heaped = len(ran) * size
        assert heaped < 32 << 20
    assert first
    until(lambda: asked_of(server) == 0)


def test_a_connection_at_rest_is_closed_and_one_in_use_is_not() -> None:
    """uvicorn's time to ask again holds where answers go the shortest way too."""
    with serving(read_timeout_s=0.8) as server, calling(server) as caller:
        request = request_of(*body_of(drawn(0)))
        caller.send(request)
        caller.answer()
        (connection,) = server.app.state.protocol.keywords["watch"]._open
        connection.timeout_keep_alive = 1
        begun = time.monotonic()
        while time.monotonic() - begun < 2:
            caller.send(request)
            caller.answer()
            time.sleep(0.1)
        rested = time.monotonic()
        assert caller.socket.recv(1) == b""
        assert time.monotonic() - rested > 0.9
