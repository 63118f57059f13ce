"""Remote engines with several device processes: the choice, further attempts, and memory."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device_errors import EngineStopped
from qkv.engine.engine import Engine
from qkv.engine.executor import launch
from qkv.errors import DeadlineExceeded, ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from support.engines import bits
from support.remote_service import (
    Service,
    end_connection,
    plain,
    queued_count,
    run,
    until,
)


def counts(fixture: Service) -> list[int]:
    """Returns the number of queued jobs of each device process."""
    return [queued_count(engine) for engine in fixture.engines]


def hold_all(fixture: Service, stack: ExitStack) -> None:
    for engine in fixture.engines:
        stack.enter_context(engine.paused())


def fail_for_ever(engine: Engine) -> None:
    """Lets the next batch break the device, as a CUDA error does."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    engine.batch_runner.launch = fails


class BreakableDevice(CpuDevice):
    """A CPU that an error of `fail_for_ever` breaks."""

    def is_fatal(self, error: BaseException) -> bool:
        return "illegal memory access" in str(error)


def test_jobs_go_to_the_device_with_the_least_work_of_all_workers() -> None:
    """One worker submits a large job; the small ones of both go to the other device."""

    async def test(fixture: Service) -> None:
        one, other = fixture.remotes
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [one.submit(plain(0, 2000))]
            await until(lambda: sum(counts(fixture)) == 1)
            large = counts(fixture).index(1)
            for seed in range(10):
                futures += [one.submit(plain(seed)), other.submit(plain(seed))]
            await until(lambda: sum(counts(fixture)) == 21)
            assert counts(fixture)[large] == 1
        await asyncio.gather(*futures)
        assert fixture.shared_state.queued_work == [0.0, 0.0]

    run(test, devices=2)


def test_equal_work_is_spread() -> None:
    async def test(fixture: Service) -> None:
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [fixture.remotes[i % 2].submit(plain(i)) for i in range(12)]
            await until(lambda: sum(counts(fixture)) == 12)
            assert counts(fixture) == [4, 4, 4]
        await asyncio.gather(*futures)
        # one after the other, so that no device has work when the next is submitted
        before = [count for count, _ in fixture.shared_state.device_totals]
        for i in range(9):
            await fixture.remotes[0].submit(plain(i))
        after = [count for count, _ in fixture.shared_state.device_totals]
        assert np.subtract(after, before).tolist() == [3, 3, 3]

    run(test, devices=3)


@pytest.mark.parametrize("length", [4, 6000], ids=["small", "copied in a thread"])
def test_jobs_of_an_ended_device_process_run_on_another(length: int) -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        jobs = [plain(seed, length if seed < 2 else 4) for seed in range(8)]
        with fixture.engines[0].paused(), fixture.engines[1].paused():
            futures = [remote.submit(job, priority=1) for job in jobs]
            if length == 4:  # else some are not sent yet
                await until(lambda: sum(counts(fixture)) == 8)
            assert all(len(link.transfers) for link in remote.links)
            end_connection(remote, 0)
            await until(lambda: counts(fixture)[1] == 8)
            assert not remote.links[0].transfers
        results = await asyncio.gather(*futures)
        for job, result in zip(jobs, results, strict=True):
            assert bits(result) == bits(await fixture.engine.submit(job))
        assert remote.is_ready
        fixture.socket_broker.connect(0)  # as if it was restarted
        await until(lambda: remote.links[0].is_ready)
        del futures, results, result
        await fixture.wait_until_free(remote)
        assert fixture.shared_state.queued_work == [0.0, 0.0]

    run(test, 1, devices=2)


def test_jobs_of_a_failed_device_run_on_another_and_it_gets_no_more() -> None:
    """Its process still runs, with an empty queue: it has the least work."""

    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        jobs = [plain(seed) for seed in range(20)]
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [remote.submit(job) for job in jobs[:10]]
            await until(lambda: counts(fixture) == [5, 5])
            fail_for_ever(fixture.engines[0])
        for job in jobs[10:]:
            futures.append(remote.submit(job))
            await asyncio.sleep(0.005)
        results = await asyncio.gather(*futures)
        for job, result in zip(jobs, results, strict=True):
            assert bits(result) == bits(await fixture.engines[1].submit(job))
        fixture.engines[0] = fixture.start_device(0)
        await until(lambda: remote.links[0].is_ready)
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [remote.submit(job) for job in jobs[:4]]
            await until(lambda: counts(fixture) == [2, 2])
        await asyncio.gather(*futures)

    run(test, 1, devices=2, device=BreakableDevice())


def test_job_that_breaks_devices_breaks_two_of_them() -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        for engine in fixture.engines:
            fail_for_ever(engine)
        with pytest.raises(ServiceUnavailable, match="device has failed") as caught:
            await remote.submit(plain(0))
        assert not isinstance(caught.value, EngineStopped)
        assert sum(link.is_ready for link in remote.links) == 1
        assert [engine.failed.is_set() for engine in fixture.engines].count(False) == 1

    run(test, 1, devices=3, device=BreakableDevice())


def test_job_without_another_device_fails() -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [remote.submit(plain(seed)) for seed in range(4)]
            await until(lambda: counts(fixture) == [2, 2])
            end_connection(remote, 0)
            await until(lambda: counts(fixture)[1] == 4)
            end_connection(remote, 1)
            for future in futures:
                with pytest.raises(ServiceUnavailable, match="ended"):
                    await future
        assert not remote.is_ready
        with pytest.raises(ServiceUnavailable, match="restarting"):
            remote.submit(plain(0))

    run(test, 1, devices=2)


def test_deadline_and_priority_hold_for_the_second_attempt() -> None:
    async def test(fixture: Service) -> None:
        remote, ended = fixture.remotes[0], list[int]()
        with ExitStack() as stack:
            hold_all(fixture, stack)
            late = [remote.submit(plain(seed), wait_s=0.3) for seed in range(2)]
            for priority in (3, 2, 1):
                for _ in range(2):  # one on each device
                    future = remote.submit(plain(0, priority), priority=priority)
                    future.add_done_callback(lambda _, p=priority: ended.append(p))  # type: ignore[misc]
            await until(lambda: sum(counts(fixture)) == 8)
            end_connection(remote, 0)
            for each in late:
                with pytest.raises(DeadlineExceeded, match="300 ms"):
                    await each
            await until(lambda: counts(fixture)[1] == 6)
        await until(lambda: len(ended) == 6)
        assert ended == [1, 1, 2, 2, 3, 3]

    run(test, 1, devices=2)


def test_memory_of_a_cancelled_second_attempt_is_free_again() -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        with ExitStack() as stack:
            hold_all(fixture, stack)
            futures = [remote.submit(plain(seed)) for seed in range(8)]
            await until(lambda: counts(fixture) == [4, 4])
            futures[0].cancel()  # also cancelled where it was first
            end_connection(remote, 0)
            await until(lambda: counts(fixture)[1] in (7, 8))
            for future in futures:
                future.cancel()
            await until(lambda: counts(fixture)[1] == 0)
        del futures, future
        await fixture.wait_until_free(remote)
        assert not any(link.transfers for link in remote.links)
        assert fixture.shared_state.queued_work == [0.0, 0.0]

    run(test, 1, devices=2)


def test_restarted_worker_waits_until_no_device_uses_its_memory() -> None:
    """One device process is free at once; the other one runs a job of the previous worker."""

    async def test(fixture: Service) -> None:
        runs, may_continue = threading.Event(), threading.Event()

        def waits(*arguments: Any) -> Any:
            runs.set()
            assert may_continue.wait(60)
            return launch(*arguments)

        for engine in fixture.engines:
            engine.batch_runner.launch = waits
        old = fixture.remotes[0]
        lost = old.submit(plain(0))
        await asyncio.to_thread(runs.wait)
        new = fixture.remotes[0] = fixture.remote(0)
        end_connection(old, 0)
        end_connection(old, 1)
        with pytest.raises(ServiceUnavailable):
            await lost
        await until(lambda: sum(link.is_ready for link in new.links) == 1)
        assert not new.is_ready
        with pytest.raises(ServiceUnavailable, match="restarting"):
            new.submit(plain(1))
        may_continue.set()
        await new.wait_until_ready()
        assert all(link.is_ready for link in new.links)
        result = await new.submit(plain(1))
        assert bits(result) == bits(await fixture.engine.submit(plain(1)))

    run(test, 1, devices=2)


def test_restarted_worker_does_not_wait_for_a_device_process_that_has_ended() -> None:
    async def test(fixture: Service) -> None:
        fixture.shared_state.clear_row(2)  # as the supervisor does
        fixture.socket_broker.create_control_socket(2).close()  # it is not connected
        for number in range(2):
            end_connection(fixture.remotes[0], number)
        new = fixture.remotes[0] = fixture.remote(0)
        await new.wait_until_ready()
        assert [link.is_ready for link in new.links] == [True, False]
        await new.submit(plain(0))

    run(test, 1, devices=2)


@pytest.mark.slow
@pytest.mark.representative
def test_no_job_is_lost_or_wrong_while_device_processes_end() -> None:
    """Jobs of many sizes; some are cancelled, and connections end again and again."""

    async def test(fixture: Service) -> None:
        draw = np.random.default_rng(0)
        sizes = (1, 7, 64, 500, 6000)
        expected = {n: bits(await fixture.engine.submit(plain(n, n))) for n in sizes}
        seen = Counter[str]()

        async def check(remote: Any, n: int) -> None:
            result: Result = await remote.submit(plain(n, n))
            seen["right" if bits(result) == expected[n] else "wrong"] += 1

        for turn in range(30):
            picks = draw.choice(sizes, 20, p=(0.3, 0.3, 0.2, 0.18, 0.02)).tolist()
            tasks = [
                asyncio.create_task(check(fixture.remotes[i % 2], n)) for i, n in enumerate(picks)
            ]
            await asyncio.sleep(0.001 * (turn % 4))
            tasks[-1].cancel()
            end_connection(fixture.remotes[turn % 2], turn % 3)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(e) for e in ended} <= {type(None), asyncio.CancelledError}, ended
            fixture.socket_broker.connect(turn % 2)
            await until(lambda turn=turn: all(x.is_ready for x in fixture.remotes[turn % 2].links))  # type: ignore[misc]
        assert set(seen) == {"right"}
        assert seen["right"] >= 30 * 19
        del tasks
        for remote in fixture.remotes:
            await fixture.wait_until_free(remote)
        assert fixture.shared_state.queued_work == [0.0] * 3

    run(test, devices=3)


def test_cost_of_a_job_has_flops_bytes_and_a_constant() -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        work = list[float]()

        async def measure(job: Job) -> None:
            with fixture.engine.paused():
                future = remote.submit(job)
                work.extend(fixture.shared_state.queued_work)
            await future

        for length in (1, 100, 1000):
            await measure(plain(0, length))
        assert work == sorted(work)
        assert work[0] > 1e6
        assert work[2] - work[0] > plain(0, 1000).plan.flops
        assert fixture.shared_state.queued_work == [0.0]

    run(test, 1)
