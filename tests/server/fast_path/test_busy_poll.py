"""A worker stays awake for its only caller, for a moment, and for nobody else."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import pytest

from qkv.server.fast_path.busy_poll import BusyPoll
from qkv.telemetry.worker_state import SharedState, WorkerState
from support.processes import wait_until
from support.raw_connection import encode_body, encode_request, random_inputs, raw_client
from support.service import running_server


def workers(count: int) -> list[WorkerState]:
    shared_state = SharedState(count)
    return [shared_state.worker(index) for index in range(count)]


def polls(shared_state: SharedState) -> list[bool]:
    return [bool(polls) for polls in shared_state.worker_rows["is_polling"]]


def turns(poll: BusyPoll) -> int:
    """Returns how often an event loop polls its sockets without waiting, after a response."""

    async def count() -> int:
        loop, found = asyncio.get_running_loop(), 0
        select = loop._selector.select  # type: ignore[attr-defined]

        def counted(timeout: float | None) -> object:
            nonlocal found
            found += timeout == 0
            return select(timeout)

        loop._selector.select = counted  # type: ignore[attr-defined]
        poll.begin(loop)
        await asyncio.sleep(0.05)
        return found

    return asyncio.run(count())


def test_a_loop_looks_at_its_sockets_without_waiting_and_then_sleeps() -> None:
    (worker,) = workers(1)
    assert turns(BusyPoll(worker, 0.0)) < 5
    assert turns(BusyPoll(worker, 0.02)) > 10
    assert polls(worker.shared_state) == [False]


def test_it_stays_awake_from_the_last_answer_on() -> None:
    (worker,) = workers(1)
    poll = BusyPoll(worker, 0.03)

    async def begun_twice() -> float:
        loop = asyncio.get_running_loop()
        poll.begin(loop)
        await asyncio.sleep(0.02)
        again = loop.time()
        poll.begin(loop)
        await asyncio.to_thread(wait_until, lambda: polls(worker.shared_state) == [False])
        return loop.time() - again

    assert asyncio.run(begun_twice()) >= 0.03


def test_it_falls_asleep_once_others_ask() -> None:
    ours, other = workers(2)
    poll = BusyPoll(ours, 0.02)

    async def asked_in_between() -> None:
        loop = asyncio.get_running_loop()
        poll.begin(loop)
        assert polls(ours.shared_state) == [True, False]
        other.add_in_flight(1)
        ended = loop.time() + 1.0
        while polls(ours.shared_state) == [True, False]:  # however often it answers
            assert loop.time() < ended
            poll.begin(loop)
            await asyncio.sleep(0.001)

    asyncio.run(asked_in_between())


def test_one_worker_at_most_stays_awake_and_only_where_nobody_else_asks() -> None:
    ours, other = workers(2)

    def only() -> tuple[bool, bool]:
        return ours.is_only_active, other.is_only_active

    assert only() == (True, True)
    ours.add_in_flight(1)
    assert only() == (True, False)
    ours.set_polling(True)
    ours.add_in_flight(-1)
    assert only() == (True, False)
    other.add_in_flight(1)
    assert only() == (False, False)
    assert turns(BusyPoll(ours, 0.02)) < 5
    assert turns(BusyPoll(other, 0.02)) < 5
    ours.set_polling(False)
    assert turns(BusyPoll(other, 0.02)) > 10


@pytest.mark.parametrize("others", [0, 1])
def test_a_service_stays_awake_for_a_lone_caller(others: int) -> None:
    request = encode_request(*encode_body(random_inputs(0)))
    with running_server(busy_poll_us=100_000) as server, ExitStack() as stack:
        caller, *_ = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
        shared_state: SharedState = server.runtime.worker.shared_state

        def awake() -> bool:
            caller.send(request)
            caller.read_response()
            time.sleep(0.002)
            return polls(shared_state) == [True]

        if others:
            assert not any(awake() for _ in range(10))
        else:
            wait_until(awake)
            wait_until(lambda: polls(shared_state) == [False])


def test_a_process_with_one_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.server.worker.usable_cpus", lambda: 1)
    request = encode_request(*encode_body(random_inputs(0)))
    with running_server(busy_poll_us=100_000) as server, raw_client(server) as caller:
        shared_state: SharedState = server.runtime.worker.shared_state
        for _ in range(10):
            caller.send(request)
            caller.read_response()
            time.sleep(0.002)
            assert polls(shared_state) == [False]
