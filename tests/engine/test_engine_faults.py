"""Faults of a job, the queue or memory: the engine continues, and every job gets a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.errors import Internal, InvalidContent, PayloadTooLarge, QkvError, ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from support.any_device import any_device as any_device
from support.engines import bits, new_job, plain, run_together, with_engine
from support.processes import TIMEOUT_S


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_failing_job_fails_alone(place: int) -> None:
    """One of 32 jobs fails; all others get their usual bits."""
    jobs = [plain(seed) for seed in range(32)]
    runs: list[int] = []

    def failing(batch: Sequence[Job], *how: Any) -> Launched:
        runs.append(len(batch))
        if jobs[place] in batch:
            raise RuntimeError("marked")
        return launch(batch, *how)

    async def test(engine: Engine) -> None:
        alone = [await engine.submit(job) for job in jobs]
        engine.batch_runner.launch = failing
        with engine.paused():
            futures = [engine.submit(job) for job in jobs]
        results = await asyncio.gather(*futures, return_exceptions=True)
        for i, (one, response) in enumerate(zip(alone, results, strict=True)):
            if i == place:
                assert isinstance(response, Internal)
                assert "marked" not in response.detail  # no internal text
            else:
                assert isinstance(response, Result)
                assert bits(response) == bits(one)

    with_engine(test)
    assert runs[0] == 32
    assert len(runs) == 11  # halved five times: the rest of each half runs once


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("x"), Internal),
        (StopIteration(), Internal),
        (SystemExit(1), Internal),
        (asyncio.CancelledError(), Internal),
        (MemoryError(), ServiceUnavailable),
        (torch.OutOfMemoryError("x"), ServiceUnavailable),
        (InvalidContent("raised by the variant"), InvalidContent),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_device_thread_survives_a_failing_batch(
    error: BaseException, expected: type[Exception]
) -> None:
    def failing(jobs: Sequence[Job], *how: Any) -> Launched:
        raise error

    async def test(engine: Engine) -> None:
        good = bits(await engine.submit(plain(1)))
        engine.batch_runner.launch = failing
        with engine.paused():
            futures = [engine.submit(plain(seed)) for seed in range(5)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(a) for a in results] == [expected] * 5
        engine.batch_runner.launch = launch
        assert engine.is_alive
        assert engine.is_ready
        assert bits(await engine.submit(plain(1))) == good

    with_engine(test)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StopIteration("secret"), Internal),
        (KeyboardInterrupt("secret"), Internal),
        (MemoryError("secret"), ServiceUnavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_event_loop_survives_a_failing_small_job(
    error: BaseException, expected: type[QkvError]
) -> None:
    """A small job runs on the event loop, where some exceptions would end the process."""

    def failing(*_: Any) -> Any:
        raise error

    async def test(engine: Engine) -> None:
        job = plain(1)
        engine.batch_runner.launch = failing
        with pytest.raises(expected) as caught:
            await engine.submit(job)
        assert "secret" not in caught.value.detail
        engine.batch_runner.launch = launch
        await engine.submit(job)
        await engine.stop()
        with pytest.raises(ServiceUnavailable):
            await engine.submit(job)

    with_engine(test)


@pytest.mark.usefixtures("any_device")
def test_device_thread_survives_a_fault_outside_a_batch() -> None:
    """A fault in the engine's accounting fails the jobs of the batch."""

    async def test(engine: Engine) -> None:
        engine.batch_runner.launch = lambda *_: list
        with engine.paused():
            futures = [engine.submit(plain(seed)) for seed in range(2)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(a) for a in results] == [Internal] * 2
        engine.batch_runner.launch = launch
        await engine.submit(plain(1))

    with_engine(test)


@pytest.mark.usefixtures("any_device")
def test_failing_queue_fails_all_queued_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> list[Any]:
        raise RuntimeError("marked")

    async def test(engine: Engine) -> None:
        with engine.paused():
            futures = [engine.submit(plain(seed, length=3 + seed)) for seed in range(3)]
            # a bug of the queue itself: nothing outside the engine can cause one
            monkeypatch.setattr(engine._queue, "take_batch", failing)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(a) for a in results] == [Internal] * 3
        await engine.failed.wait()
        assert (engine.is_ready, engine.is_alive) == (False, True)
        with pytest.raises(ServiceUnavailable):
            engine.submit(plain(1))

    with_engine(test)


def fail(words: str) -> None:
    raise RuntimeError(words)


@pytest.mark.parametrize(
    ("allocate", "expected"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), PayloadTooLarge),
        (lambda: np.empty(1 << 60, np.uint8), PayloadTooLarge),
        (
            lambda: fail("DefaultCPUAllocator: can't allocate memory: 64 bytes"),
            ServiceUnavailable,
        ),
    ],
    ids=["torch", "numpy", "temporary"],
)
def test_out_of_memory_on_a_cpu(
    allocate: Callable[[], object],
    expected: type[QkvError],
) -> None:
    """A RuntimeError of the CPU allocator is temporary: 503. An allocation beyond the memory of
    the machine always fails: 413."""

    def greedy(jobs: Sequence[Job], *how: Any) -> Launched:
        allocate()
        raise AssertionError

    async def test(engine: Engine) -> None:
        with pytest.raises(expected, match="memory"):
            await engine.submit(plain(1))

    with_engine(test, launch=greedy)


def test_out_of_memory_halves_batches_for_a_while() -> None:
    """Every job that fits alone has its result, and the budget of a batch recovers slowly."""
    arrays = dict.fromkeys(("query", "key", "value"), np.ones((1, 1, 1, 1 << 16), np.float32))
    jobs = [new_job(arrays) for _ in range(16)]  # each of 1 MiB, with its output
    sizes: list[int] = []
    room = [4 << 20]

    def tight(batch: Sequence[Job], *how: Any) -> Launched:
        if sum(job.plan.bytes_in + job.plan.bytes_out for job in batch) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        sizes.append(len(batch))
        return launch(batch, *how)

    async def test(engine: Engine) -> None:
        async def wave() -> list[int]:
            sizes.clear()
            await run_together(engine, jobs)
            return list(sizes)

        assert await wave() == [4, 4, 4, 4]
        room[0] = 64 << 20
        assert max(await wave()) < 16
        for _ in range(20):
            last = await wave()
        assert last == [16]
        room[0] = 0
        with pytest.raises(ServiceUnavailable, match="memory"):
            await engine.submit(jobs[0])
        assert engine.is_alive

    with_engine(test, launch=tight, batch_bytes=64 << 20)


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("call", [1, 2, 3])
def test_bug_in_a_callback_leaves_no_job_without_a_result(call: int) -> None:
    """Neither the batch that begins nor the one before it."""
    calls: list[bool] = []

    def on_busy(is_busy: bool) -> None:
        calls.append(is_busy)
        if len(calls) == call:
            raise OSError("a bug")

    async def test(engine: Engine) -> None:
        with engine.paused():
            futures = [engine.submit(plain(seed, length=4 + seed)) for seed in range(3)]
        done = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), TIMEOUT_S)
        assert all(isinstance(result, Result) for result in done)
        assert not engine.failed.is_set()

    with_engine(test, on_busy=on_busy)
