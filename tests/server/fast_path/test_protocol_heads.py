"""Heads that came before are not parsed again, and few of them are kept."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from qkv.api.fast_path.run_cache import RequestKey, RunCache
from qkv.server.fast_path.pending_request import RequestHead
from qkv.server.fast_path.protocol import FastPathProtocol
from support.processes import wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.service import Server


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Requests that no parser has seen."""
    taken: list[bytes] = []
    take = FastPathProtocol._take_again

    def noted(connection: FastPathProtocol, head: RequestHead, data: bytes) -> None:
        taken.append(data)
        take(connection, head, data)

    monkeypatch.setattr(FastPathProtocol, "_take_again", noted)
    return taken


def test_a_head_that_came_before_is_not_parsed_again(server: Server, unparsed: list[bytes]) -> None:
    """But its numbers are others, and so is every other head."""
    bodies = [encode_body(random_inputs(seed)) for seed in range(8)]
    with raw_client(server) as caller:
        answers = []
        for body, length in bodies:
            caller.send(encode_request(body, length, PATH, "X-Request-ID: mine"))
            answers.append(caller.read_response())
        came = len(unparsed)
        assert came >= len(bodies) - 3
        for (body, length), (_, _, data) in zip(bodies, answers, strict=True):
            caller.send(
                encode_request(body, length, PATH, f"X-Request-ID: {length}{data[:1].hex()}")
            )
            headers, _, again = caller.read_response()
            assert again == data
            assert headers["x-request-id"] == f"{length}{data[:1].hex()}"
    assert all(headers["x-request-id"] == "mine" for headers, *_ in answers)
    causal, length = encode_body(random_inputs(0), parameters={"causal": True})
    assert len({data for *_, data in answers}) == len(bodies)
    with raw_client(server) as caller:
        for _ in range(4):  # two kinds of body behind one connection, in turn
            caller.send(encode_request(*bodies[0]))
            assert caller.read_response()[2] == answers[0][2]
            caller.send(encode_request(causal, length))
            assert caller.read_response()[2] != answers[0][2]


@pytest.mark.parametrize("others", [0, 2])
def test_what_follows_a_head_that_came_before_is_read_as_ever(
    server: Server, unparsed: list[bytes], others: int
) -> None:
    """Cut anywhere, two at once, behind other requests, with garbage behind it."""
    body, length = encode_body(random_inputs(0))
    request = encode_request(body, length)
    with ExitStack() as stack:
        caller, *_ = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
        caller.send(request)
        first = caller.read_response()[2]
        for _ in range(3):
            caller.send(request)
            assert caller.read_response()[2] == first
        assert unparsed
        for cut in (1, 20, len(request) - len(body), len(request) - 1):
            caller.send(request[:cut])
            time.sleep(0.02)
            caller.send(request[cut:])
            assert caller.read_response()[2] == first
        caller.send(request + request + request[:40])
        assert caller.read_response()[2] == caller.read_response()[2] == first
        caller.send(request[40:])
        assert caller.read_response()[2] == first
        caller.send(b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n")
        assert caller.body()
        taken = len(unparsed)
        for _ in range(2):  # the first behind another kind of request is parsed
            caller.send(request)
            assert caller.read_response()[2] == first
        assert len(unparsed) == taken + 1
        caller.send(request + b"\0\0")  # its answer is due all the same
        assert caller.read_response()[2] == first
        assert caller.status() == 400


@pytest.mark.parametrize("step", ["run", "reply"])
@pytest.mark.parametrize("others", [0, 2])
def test_what_was_not_parsed_can_go_the_long_way(
    server: Server,
    unparsed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    others: int,
) -> None:
    request = encode_request(*encode_body(random_inputs(0)))
    received = server.runtime.observer._metrics_recorder._totals
    with ExitStack() as stack:
        caller, *_ = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
        for _ in range(3):
            caller.send(request)
            first = caller.read_response()[2]
        before, taken = received[0], len(unparsed)
        with monkeypatch.context() as patch:
            patch.setattr(RunCache, step, lambda *_: None if step == "run" else 1 / 0)
            caller.send(request)
            assert caller.read_response()[2] == first
        assert len(unparsed) == taken + 1
        assert received[0] - before == len(
            encode_body(random_inputs(0))[0]
        )  # each byte is counted once
        caller.send(request)
        assert caller.read_response()[2] == first
    wait_until(lambda: in_flight_count(server) == 0)


def test_a_head_by_itself_that_came_before_is_not_parsed_again(
    server: Server, unparsed: list[bytes]
) -> None:
    """As Python's clients send it."""
    body, length = encode_body(random_inputs(0))
    request = encode_request(body, length)
    head = request[: -len(body)]
    with raw_client(server) as caller:
        for _ in range(4):
            caller.send(head)
            time.sleep(0.02)
            caller.send(body)
            caller.read_response()
    assert unparsed == [head, head]


def test_few_are_kept(server: Server) -> None:
    """Of headers and of heads, however many come."""
    shortcuts: RunCache = server.runtime.run_cache
    with raw_client(server) as caller:
        for i in range(40):
            caller.send(encode_request(*encode_body(random_inputs(0), id=f"{i:04}")))
            caller.read_response()
        for i in range(300):
            caller.send(encode_request(*encode_body(random_inputs(0)), PATH, f"Accept: a/{i}"))
            caller.read_response()
    assert len(shortcuts._known) <= 256
    assert all(len(known.plans) <= 16 for known in shortcuts._known.values())
    assert shortcuts.find(RequestKey(b"/", ())) is None


@pytest.mark.slow
def test_what_is_kept_is_bounded_in_bytes(serve: Callable[..., Server]) -> None:
    """The longest heads, behind the longest headers: nobody can have a worker keep more than
    64 MiB so, and what is said in more words is not kept."""
    server = serve()
    shortcuts: RunCache = server.runtime.run_cache

    def kept() -> int:
        gc.collect()
        return sum(len(known.plans) for known in shortcuts._known.values())

    def fill(letter: str, size: int) -> None:
        for i in range(100, 110):
            for j in range(100, 116):
                body, length = encode_body(random_inputs(0), id=f"{i}{j}" + "x" * 3700)
                assert 3900 < length <= 4096
                caller.send(encode_request(body, length, PATH, f"Accept: {i}{letter * size}"))
                caller.read_response()

    with raw_client(server) as caller:
        fill("a", 3)  # so that what else is kept of heads is full
        before = kept()
        tracemalloc.start()
        fill("b", 3700)
        count = kept() - before
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        fill("c", 5000)
    assert count == 160
    assert held / count < (64 << 20) / (256 * 16)
    assert kept() == before + count
