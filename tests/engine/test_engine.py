"""The engine on a real event loop: batches, limits of the queue, and timing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from qkv.attention.catalogue import variants
from qkv.engine.engine import DEFAULT_LIMIT, Engine
from qkv.engine.executor import Launched, launch
from qkv.engine.forward import Outputs, call_variant
from qkv.errors import ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.result import Result
from qkv.telemetry.worker_state import SharedState
from support.any_device import any_device as any_device
from support.engines import job_of, plain, run_together, with_engine

pytestmark = pytest.mark.usefixtures("any_device")

# ---------------------------------------------------------------- batches


def test_only_equal_keys_share_a_batch() -> None:
    """Parameters, lengths, dtypes and outputs are in the key; numbers and ranks are not."""
    flat = {n: torch.randn(4, 8) for n in ("query", "key", "value")}
    jobs = [
        plain(1), plain(2, batch=3),
        plain(3, length=5), plain(4, causal=True), plain(5, outputs=("output",)),
        plain(6, dropout=0.5, seed=1), plain(7, dropout=0.5, seed=2),
        job_of(flat), job_of({n: t[None, None] for n, t in flat.items()}),
        job_of({n: t.double() for n, t in flat.items()}),
    ]  # fmt: skip

    async def test(engine: Engine) -> list[int]:
        return [a.batch_size for a in await run_together(engine, jobs)]

    assert with_engine(test) == [2, 2, 1, 1, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_batch": 2}, [2, 2, 2, 2, 1]),
        ({"max_batch": 1}, [1, 1, 1, 1, 1]),
    ],
)
def test_max_batch(options: dict[str, int], sizes: list[int]) -> None:
    async def test(engine: Engine) -> list[int]:
        results = await run_together(engine, [plain(seed) for seed in range(5)])
        return [a.batch_size for a in results]

    assert with_engine(test, **options) == sizes


def test_default_of_max_batch(any_device: str) -> None:
    """A CPU runs each job alone."""

    async def test(engine: Engine) -> list[int]:
        results = await run_together(engine, [plain(seed) for seed in range(5)])
        return [a.batch_size for a in results]

    assert with_engine(test, max_batch=0) == ([1] * 5 if any_device == "cpu" else [5] * 5)


def test_the_oldest_group_runs_first() -> None:
    """Younger jobs with the same batch key run with it, before jobs in between."""
    jobs = [plain(0), plain(1, length=5), plain(2), plain(3, length=6), plain(4, length=5)]

    async def test(engine: Engine) -> list[int]:
        done: list[int] = []
        with engine.paused():
            futures = [engine.submit(job) for job in jobs]
            for i, future in enumerate(futures):
                future.add_done_callback(lambda _, i=i: done.append(i))  # type: ignore[misc]
        await asyncio.gather(*futures)
        return done

    assert with_engine(test) == [0, 2, 1, 4, 3]


def test_batch_stays_within_its_byte_budget() -> None:
    """Bytes in and out count; a job that exceeds the budget by itself runs alone."""
    small, large = plain(0), plain(0, batch=8)
    one = small.plan.bytes_in + small.plan.bytes_out
    jobs = [plain(1), plain(2), plain(3), large, plain(4)]
    assert {job.batch_key for job in jobs} == {small.batch_key}

    async def test(engine: Engine) -> list[int]:
        return [a.batch_size for a in await run_together(engine, jobs)]

    assert with_engine(test, batch_bytes=2 * one) == [2, 2, 1, 1, 1]


def test_cancelled_jobs_do_not_run() -> None:
    """Cancels the first job, one inside a group, and all jobs of a group."""
    executed: list[Job] = []

    def recorded(jobs: Sequence[Job], *how: Any) -> Launched:
        executed.extend(jobs)
        return launch(jobs, *how)

    jobs = [plain(seed, length=4 + seed % 2) for seed in range(6)] + [plain(6, length=9)]
    cancelled = {0, 3, 6}

    async def test(engine: Engine) -> None:
        with engine.paused():
            futures = [engine.submit(job) for job in jobs]
            for i in cancelled:
                futures[i].cancel()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert {
            i for i, a in enumerate(results) if isinstance(a, asyncio.CancelledError)
        } == cancelled
        sizes = [a.batch_size for a in results if isinstance(a, Result)]
        assert sizes == [2, 2, 2, 2]
        with engine.paused():
            futures = [engine.submit(plain(seed)) for seed in range(3)]
            for future in futures:
                future.cancel()
        await engine.submit(plain(9))  # cancelled jobs do not block it

    with_engine(test, launch=recorded)
    assert [jobs.index(job) for job in executed[:-1]] == [1, 5, 2, 4]


def test_running_job_may_be_cancelled() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(jobs: Sequence[Job], *how: Any) -> Launched:
        entered.set()
        assert go_on.wait(60)
        return launch(jobs, *how)

    async def test(engine: Engine) -> None:
        with engine.paused():
            cancelled_future, other_future = engine.submit(plain(1)), engine.submit(plain(2))
        assert await asyncio.to_thread(entered.wait, 60)
        cancelled_future.cancel()
        go_on.set()
        assert (await other_future).batch_size == 2
        assert cancelled_future.cancelled()
        await engine.submit(plain(3))

    with_engine(test, launch=slow)


# ---------------------------------------------------------------- limits


def test_unfinished_operations_count_until_the_results() -> None:
    async def test(engine: Engine) -> None:
        jobs = [plain(seed) for seed in range(3)]
        with engine.paused():
            futures = [engine.submit(job) for job in jobs]
            assert engine.unfinished_flops >= sum(job.plan.flops for job in jobs) > 0
        await asyncio.gather(*futures)
        assert engine.unfinished_flops == 0

    with_engine(test)


def test_queued_bytes_are_limited() -> None:
    """More jobs are rejected until queued ones are run or cancelled."""
    job = plain(1)
    size = job.plan.bytes_in + job.plan.bytes_out

    async def test(engine: Engine) -> None:
        for _ in range(3):
            with engine.paused():
                futures = [engine.submit(plain(seed)) for seed in range(3)]
                with pytest.raises(ServiceUnavailable) as caught:
                    engine.submit(plain(3))
                assert caught.value.status == 503
                assert int(caught.value.headers()["Retry-After"]) >= 1
                futures[1].cancel()
                await asyncio.sleep(0)
                futures.append(engine.submit(plain(4)))  # in place of the cancelled job
                with pytest.raises(ServiceUnavailable):
                    engine.submit(plain(5))
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(a) for a in results].count(Result) == 3
        assert engine.queued == Load()

    with_engine(test, limit=DEFAULT_LIMIT._replace(bytes=3 * size))


def test_stop_runs_queued_jobs() -> None:
    async def test(engine: Engine) -> None:
        with engine.paused():
            futures = [engine.submit(plain(seed, length=3 + seed % 3)) for seed in range(6)]
            stopping = asyncio.ensure_future(engine.stop())
            await asyncio.sleep(0.02)
            assert (engine.is_ready, engine.is_alive) == (False, True)
            with pytest.raises(ServiceUnavailable, match="stopping"):
                engine.submit(plain(9))
        results = await asyncio.gather(*futures)
        assert len(results) == 6
        await stopping
        assert (engine.is_ready, engine.is_alive) == (False, False)
        with pytest.raises(ServiceUnavailable):
            engine.submit(plain(9))

    with_engine(test)


def test_holds_nest() -> None:
    async def test(engine: Engine) -> None:
        with engine.paused():
            with engine.paused():
                future = engine.submit(plain(1))
            await asyncio.sleep(0.02)
            assert not future.done()
        await future

    with_engine(test)


def test_engine_keeps_nothing_of_a_finished_job() -> None:
    """An idle engine keeps neither the tensors nor the result of the last job."""

    async def test(engine: Engine) -> None:
        job = plain(1)
        job_reference = weakref.ref(job)
        result_reference = weakref.ref((await engine.submit(job)).outputs["output"].data.obj)
        del job
        deadline = time.monotonic() + 10
        while (
            job_reference() is not None or result_reference() is not None
        ) and time.monotonic() < deadline:
            gc.collect()
            await asyncio.sleep(0.01)
        assert job_reference() is None
        assert result_reference() is None

    with_engine(test)


# ---------------------------------------------------------------- timing


def test_timing_is_measured() -> None:
    """Each time is compared with one that is measured around it, or inside it."""

    async def test(engine: Engine) -> None:
        started_at = time.perf_counter()
        with engine.paused():
            early = engine.submit(plain(1, outputs=("output",)))
            early_at = time.perf_counter()
            late = engine.submit(plain(2, length=5))
            late_at = time.perf_counter()
        first, second = await early, await late
        most_s = time.perf_counter() - started_at
        assert first.times.queue_s >= late_at - early_at
        assert 0 < second.times.queue_s <= most_s
        for result in (first, second):
            times = result.times
            stages = times.queue_s, times.load_s, times.compute_s, times.split_s
            assert min(stages) > 0
            assert sum(stages) <= times.total_s <= most_s
        assert first.device == engine.device_name
        assert (first.backend, second.backend) == ("sdpa", "explicit")
        idle = [await engine.submit(plain(3)) for _ in range(5)]
        assert {result.batch_size for result in idle} == {1}

    with_engine(test)


def test_compute_time_is_that_of_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[float] = []

    def measured(*how: Any) -> Outputs:
        started_at = time.perf_counter()
        outputs = call_variant(*how)
        inside.append(time.perf_counter() - started_at)
        return outputs

    monkeypatch.setattr("qkv.engine.executor.call_variant", measured)

    async def test(engine: Engine) -> None:
        times = (await engine.submit(plain(2, length=2048))).times
        assert len(inside) == 1
        assert inside[0] <= times.compute_s <= times.total_s - times.load_s - times.split_s

    with_engine(test)


def test_flops_and_bytes_are_counted() -> None:
    """FLOPs are 2 B H L S (D + E), bytes those of all tensors; projections count too."""
    query, key = torch.randn(3, 4, 5, 6), torch.randn(3, 2, 7, 6)
    value = torch.randn(3, 2, 7, 8)
    job = job_of({"query": query, "key": key, "value": value})
    roles = ("query", "key", "value")
    weights = {f"W_{n}.weight": torch.randn(8, 6) for n in roles}
    biases = {f"W_{n}.bias": torch.randn(8) for n in roles}
    layer = {"layout": "v2", "heads": 2, "tensors": weights | biases}
    layered = job_of({"x": torch.randn(3, 5, 6)}, ("output",), layer)

    sent = query.numel() + key.numel() + value.numel()
    assert job.plan.flops == 2 * 3 * 4 * 5 * 7 * (6 + 8)
    assert job.plan.bytes == 4 * (sent + 3 * 4 * 5 * 8 + 3 * 4 * 5 * 7)
    assert layered.plan.flops == 3 * 2 * 3 * 5 * 6 * 8 + 2 * 3 * 2 * 5 * 5 * (4 + 4)
    assert layered.plan.bytes == 4 * (3 * 5 * 6 + 3 * (6 * 8 + 8) + 3 * 5 * 8)


def test_rate_is_known_after_the_first_long_batch_of_a_client() -> None:
    def slow(jobs: Sequence[Job], *how: Any) -> Launched:
        time.sleep(0.011)
        return launch(jobs, *how)

    async def test(engine: Engine) -> None:
        await engine.prepare(SharedState(1, variants=tuple(variants())).worker(0))
        after_warm_up = engine.flops_per_s
        job = plain(1, length=2048)  # a small one runs on the event loop
        await engine.submit(job)
        assert after_warm_up is None
        assert 0 < (engine.flops_per_s or 0) <= job.plan.flops / 0.011

    with_engine(test, launch=slow)


def test_throughput_counts_the_time_of_the_work(any_device: str) -> None:
    """`Retry-After` follows from it: batches that overlap do not count twice."""

    def slow(jobs: Sequence[Job], *how: Any) -> Launched:
        launched = launch(jobs, *how)

        def finish() -> list[Result]:
            time.sleep(0.1)
            return launched()

        if any_device == "pretended":  # the work is done when the result is awaited
            return finish
        outputs = finish()
        return lambda: outputs

    # equal work, and batches of one
    jobs = [plain(seed, scale=1.0 + seed) for seed in range(4)]

    async def test(engine: Engine) -> None:
        started_at = time.perf_counter()
        with engine.paused():
            futures = [engine.submit(job) for job in jobs]
        await asyncio.gather(*futures)
        spent = time.perf_counter() - started_at
        weights = [0.9**age for age in range(4)]  # of the batches in the estimate, last one first
        assert engine.flops_per_s is not None
        seconds = jobs[0].plan.flops * sum(weights) / engine.flops_per_s
        assert 0.1 * sum(weights) <= seconds <= spent

    with_engine(test, launch=slow)
