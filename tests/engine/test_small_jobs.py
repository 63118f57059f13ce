"""Small jobs on the event loop: same bits as in the device thread, while others run or wait."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, execute, launch
from qkv.errors import Internal
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from support.engines import CPU, bits, new_job, with_engine
from support.known_requests import DTYPES
from support.processes import TIMEOUT_S
from support.raw_connection import NAMES, inputs_for, random_inputs


def small_jobs(dtype: str, count: int) -> list[Job]:
    """Returns small jobs of several variants and shapes."""
    random, jobs = np.random.default_rng(0), []
    for name in ("softmax", "sigmoid", "linear", "taylor", "efficient", "linformer"):
        for _ in range(count):
            H, L, D = (int(random.choice([1, 2, 3, 5, 7, 16, 33, 64, 65])) for _ in range(3))
            arrays = {n: random.normal(size=(1, H, L, D)).astype(DTYPES[dtype]) for n in NAMES}
            jobs.append(new_job(arrays, name, outputs=["output", "weights"]))
    return [job for job in jobs if job.plan.is_small]


async def submit_queued(engine: Engine, job: Job) -> Result:
    """Returns the result of a job in the device thread."""
    with engine.paused():
        future = engine.submit(job)
    return await future


def threads_of_jobs(ran: list[int]) -> Callable[..., Launched]:
    """Returns a `launch` that records the thread of each job."""

    def recorded(jobs: Sequence[Job], *how: Any) -> Launched:
        ran.append(threading.get_native_id())
        return launch(jobs, *how)

    return recorded


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_small_job_has_the_same_bits_as_in_the_device_thread(dtype: str) -> None:
    async def test(engine: Engine) -> None:
        for job in small_jobs(dtype, 25):
            small = bits(await engine.submit(job))
            assert small == bits(await submit_queued(engine, job))

    with_engine(test)


def test_large_job_runs_in_the_device_thread_and_a_small_one_does_not() -> None:
    ran: list[int] = []

    async def test(engine: Engine) -> None:
        small, large = new_job(random_inputs(0)), new_job(random_inputs(0, (1, 8, 1024, 64)))
        assert large.plan.flops > small.plan.flops
        await engine.submit(large)
        await engine.submit(small)
        assert ran[0] != ran[1] == threading.get_native_id()
        values = {"value": random_inputs(0, (1, 1, 30000, 1))["value"]}
        assert not new_job(values, "mean", parameters={"method": "loop"}).plan.is_small
        long = {name: np.ones((2000, 1), np.float32) for name in NAMES}
        for name in ("linear", "taylor", "efficient", "linformer"):  # numbers may make it quadratic
            assert not new_job(long, name).plan.is_small

    with_engine(test, launch=threads_of_jobs(ran))


def test_no_job_runs_on_the_event_loop_where_batches_are_stacked() -> None:
    """As on a GPU, where small jobs gain most from a batch."""

    ran: list[int] = []

    async def test(engine: Engine) -> None:
        await engine.submit(new_job(random_inputs(0)))
        assert threading.get_native_id() not in ran

    with_engine(test, stack=True, launch=threads_of_jobs(ran))
    assert len(ran) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize("more", [0, 10, 15])
def test_device_thread_is_nicer_than_the_event_loop(more: int) -> None:
    """Ray starts processes with a niceness of 15. Only root may lower it, so the thread adds."""
    before = set(threading.enumerate())  # other tests may have engines

    async def test(engine: Engine) -> int:
        await engine.submit(new_job(random_inputs(0)))
        threads = set(threading.enumerate()) - before
        (thread,) = (t for t in threads if t.name == "qkv-device")
        assert thread.native_id is not None
        return os.getpriority(os.PRIO_PROCESS, thread.native_id)

    def run() -> None:
        loop = threading.get_native_id()
        niceness = min(os.getpriority(os.PRIO_PROCESS, loop) + more, 19)
        os.setpriority(os.PRIO_PROCESS, loop, niceness)
        assert with_engine(test) == min(niceness + 6, 19)

    with ThreadPoolExecutor(1) as pool:  # niceness belongs to a thread, and its threads inherit it
        pool.submit(run).result()


def test_small_job_runs_while_the_device_thread_is_held() -> None:
    async def test(engine: Engine) -> None:
        small, large = new_job(random_inputs(0)), new_job(random_inputs(0, (1, 8, 1024, 64)))
        with engine.paused(small_jobs=False):
            queued = engine.submit(large)
            result = await engine.submit(small)
            assert result.batch_size == 1
            assert not queued.done()
            assert engine.queued.requests == 1
        await queued
        assert bits(result) == bits(await submit_queued(engine, small))

    with_engine(test)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_small_jobs_have_the_same_bits_while_a_large_job_runs(dtype: str) -> None:
    """The device thread computes on two threads meanwhile, again and again."""
    large = new_job(random_inputs(0, (1, 8, 512, 64)))
    is_running, stop = threading.Event(), threading.Event()

    def endless(jobs: Sequence[Job], *how: Any) -> Launched:
        while jobs[0] is large and not stop.is_set():
            launch(jobs, *how)()
            is_running.set()
        return launch(jobs, *how)

    async def test(engine: Engine) -> None:
        alone = execute([large], CPU, False, 2, 1)[0].outputs["output"].data
        jobs = small_jobs(dtype, 5)
        before = [bits(await submit_queued(engine, job)) for job in jobs]
        running = engine.submit(large)
        try:
            assert is_running.wait(TIMEOUT_S)
            for job, expected in zip(jobs, before, strict=True):
                assert bits(await engine.submit(job)) == expected
            assert not running.done()
        finally:
            stop.set()
        assert (await running).outputs["output"].data == alone

    with_engine(test, launch=endless)


def test_small_job_does_not_hide_a_stuck_device() -> None:
    """`on_busy` tells the supervisor since when the device thread runs one batch."""
    changes: list[bool] = []
    is_running, stop = threading.Event(), threading.Event()
    large = new_job(random_inputs(0, (1, 8, 1024, 64)))

    def stuck(jobs: Sequence[Job], *how: Any) -> Launched:
        if jobs[0] is large:
            is_running.set()
            assert stop.wait(TIMEOUT_S)
        return launch(jobs, *how)

    async def test(engine: Engine) -> None:
        running = engine.submit(large)
        assert is_running.wait(TIMEOUT_S)
        try:
            for _ in range(3):
                await engine.submit(new_job(random_inputs(0)))
            assert changes == [True]
        finally:
            stop.set()
        await running
        assert changes == [True, False]
        await engine.submit(new_job(random_inputs(0)))
        assert changes == [True, False]

    with_engine(test, launch=stuck, on_busy=changes.append)


@pytest.mark.parametrize("name", sorted(variants()))
def test_outputs_do_not_share_memory_with_inputs(name: str) -> None:
    """The buffer of a body may be overwritten before its response is sent."""

    async def test(engine: Engine) -> None:
        arrays = inputs_for(name)
        job = new_job(arrays, name, outputs=list(variants()[name].outputs))
        result = await engine.submit(job)
        before = bits(result)
        for array in arrays.values():
            array.fill(7)
        assert bits(result) == before

    with_engine(test)


def test_small_jobs_of_one_turn_run_one_after_another() -> None:
    """Before the first of their requests goes on; each has the bits that it has alone."""
    events: list[str] = []

    async def run(engine: Engine, job: Job) -> Result:
        result = await engine.submit(job)
        events.append("response")
        return result

    def recorded(jobs: Sequence[Job], *arguments: Any) -> Launched:
        events.append("run")
        return launch(jobs, *arguments)

    async def test(engine: Engine) -> None:
        jobs = small_jobs("float32", 2)
        alone = [bits(await engine.submit(job)) for job in jobs]
        engine.batch_runner.launch = recorded
        results = await asyncio.gather(*[run(engine, job) for job in jobs])
        assert events == ["run"] * len(jobs) + ["response"] * len(jobs)
        assert [bits(result) for result in results] == alone

    with_engine(test)


def test_failed_or_cancelled_job_of_a_turn_leaves_the_others() -> None:
    async def test(engine: Engine) -> None:
        good = [new_job(random_inputs(seed)) for seed in range(3)]
        bad, count = new_job(random_inputs(7)), 0

        def failing(jobs: Sequence[Job], *arguments: Any) -> Launched:
            nonlocal count
            count += 1
            if jobs[0] is bad:
                raise ZeroDivisionError("marked")
            return launch(jobs, *arguments)

        engine.batch_runner.launch = failing
        tasks = [engine.submit(job) for job in [*good[:2], bad]]
        cancelled = engine.submit(good[2])
        cancelled.cancel()
        first, second, failed, gone = await asyncio.gather(
            *tasks, cancelled, return_exceptions=True
        )
        assert isinstance(first, Result)
        assert isinstance(second, Result)
        assert isinstance(failed, Internal)
        assert isinstance(gone, asyncio.CancelledError)
        assert count == 3

    with_engine(test)
