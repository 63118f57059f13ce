"""Remote engines and the device process on one event loop: real sockets, no forks."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from qkv.attention.variant import Variant
from qkv.engine.engine import Engine
from qkv.engine.executor import launch
from qkv.engine.remote import device_process
from qkv.engine.remote.channel import Channel
from qkv.engine.remote.messages import MessageType
from qkv.errors import DeadlineExceeded, Internal, InvalidContent, QkvError, ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.plan import Plan
from qkv.jobs.plan_description import KnownPlans, PlanDescription, describe
from qkv.jobs.result import Result
from qkv.telemetry.model_statistics import triton_statistics
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support import engines
from support.any_device import any_device as any_device
from support.batch_jobs import VARIANTS_AND_JOBS, random_jobs
from support.engines import bits
from support.remote_service import (
    LIMITS,
    Service,
    end_connection,
    plain,
    queued_count,
    run,
    until,
)

each_device = pytest.mark.usefixtures("any_device")


@pytest.mark.parametrize(("variant", "kind"), VARIANTS_AND_JOBS)
def test_results_equal_those_of_a_local_engine(variant: Variant, kind: type[Plan]) -> None:
    async def test(fixture: Service) -> None:
        for seed in range(4):
            for job in random_jobs(variant, kind, seed):
                there = await fixture.remotes[seed % 2].submit(job)
                here = await fixture.engine.submit(job)
                assert bits(there) == bits(here)
                assert list(there.outputs) == list(here.outputs)
                for name in ("batch_size", "device", "backend", "notes"):
                    assert getattr(there, name) == getattr(here, name)
                assert 0 < there.times.queue_s < 60
                assert there.times.compute_s > 0

    run(test)


@each_device
def test_notes_on_the_numbers_of_a_job_arrive() -> None:
    """Each job of a turn has its own."""

    def new_job(size: float) -> Job:
        ones = np.ones((1, 1, 3, 4), np.float32)
        arrays = {"query": ones, "key": size * ones, "value": ones, "beta": ones[..., 0]}
        raw = {name: RawTensor.from_numpy(x) for name, x in arrays.items()}
        return Job.new(Plan, "gated", Message({"parameters": {"rule": "delta"}}, raw), LIMITS)

    async def test(fixture: Service) -> None:
        with fixture.engine.paused():
            futures = [fixture.remotes[0].submit(new_job(size)) for size in (0.5, 3.0, 0.5)]
            await until(lambda: queued_count(fixture.engine) == 3)
        results = await asyncio.gather(*futures)
        assert [result.batch_size for result in results] == [3, 3, 3]
        assert [len(result.notes) for result in results] == [0, 1, 0]

    run(test)


@each_device
def test_jobs_with_layers_run_remotely() -> None:
    draw = np.random.default_rng(0)
    x = RawTensor.from_numpy(draw.normal(size=(2, 5, 6)).astype(np.float32))
    for layout, (suffix, turned) in {"v1": ("", False), "v2": (".weight", True)}.items():
        weights = {
            f"W_{role}{suffix}": RawTensor.from_numpy(
                draw.normal(size=(8, 6) if turned else (6, 8)).astype(np.float32)
            )
            for role in ("query", "key", "value")
        }
        fields = {"outputs": ["output"], "layer": {"layout": layout, "heads": 2}}
        job = Job.new(Plan, "softmax", Message(fields, {"x": x}, weights), LIMITS)

        async def test(fixture: Service, job: Job = job) -> None:
            for _ in range(2):
                there = await fixture.remotes[0].submit(job)
                assert bits(there) == bits(await fixture.engine.submit(job))

        run(test)


@each_device
def test_runs_of_a_comparison_run_remotely() -> None:
    draw = np.random.default_rng(0)
    shapes = {"query": (2, 4, 7, 3), "key": (2, 2, 5, 3), "value": (2, 2, 5, 3)}
    raw = {n: RawTensor.from_numpy(draw.normal(size=s)) for n, s in shapes.items()}
    request = CompareRequest(Message({"variants": ["linear"], "per_head": True}, raw), LIMITS)
    (entry,) = request.variants
    plans = [entry.plan, entry.plan.measured(peak=True), entry.rows_plan(request.rows)]

    async def test(fixture: Service) -> None:
        for plan in plans:
            job = Job(plan, entry.tensors)
            there = await fixture.remotes[0].submit(job)
            here = await fixture.engine.submit(job)
            assert bits(there) == bits(here)
            assert there.peak_bytes == here.peak_bytes
            assert (there.peak_bytes > 0) is plan.measurement.peak
        assert there.outputs["weights"].shape == (2, 4, 7, 5)

    run(test)


@each_device
def test_jobs_of_several_workers_are_one_batch() -> None:
    async def test(fixture: Service) -> None:
        jobs = [plain(seed) for seed in range(9)]
        alone = [await fixture.engine.submit(job) for job in jobs]
        with fixture.engine.paused():
            futures = [fixture.remotes[i % 3].submit(job) for i, job in enumerate(jobs)]
            await until(lambda: queued_count(fixture.engine) == 9)
        for one, other in zip(alone, await asyncio.gather(*futures), strict=True):
            assert bits(one) == bits(other)
            assert other.batch_size == 9

    run(test, 3)


def test_priorities_and_deadlines_hold() -> None:
    async def test(fixture: Service) -> None:
        ended: list[int] = []
        with fixture.engine.paused():
            for priority in (3, 2, 1):
                future = fixture.remotes[0].submit(plain(0, priority), priority=priority)
                future.add_done_callback(lambda _, p=priority: ended.append(p))  # type: ignore[misc]
            late = fixture.remotes[0].submit(plain(0, 9), wait_s=0.05)
            with pytest.raises(DeadlineExceeded, match="50 ms"):
                await late
        await until(lambda: len(ended) == 3)
        assert ended == [1, 2, 3]
        found = triton_statistics(fixture.shared_state.counters, "softmax")
        assert found["inference_count"] == 3  # the late one does not run

    run(test)


@pytest.mark.parametrize("priority", [-1, 256, 1 << 40])
def test_any_priority_is_accepted(priority: int) -> None:
    """Clients of the Open Inference Protocol may send any."""

    async def test(fixture: Service) -> None:
        response = await fixture.remotes[0].submit(plain(0), priority=priority)
        assert bits(response) == bits(await fixture.engine.submit(plain(0)))

    run(test)


def test_deadline_counts_from_submission_in_the_worker() -> None:
    async def test(fixture: Service) -> None:
        with fixture.engine.paused():
            future = fixture.remotes[0].submit(plain(0), wait_s=30.0)
            await until(lambda: queued_count(fixture.engine) == 1)
            await asyncio.sleep(0.05)
        response = await future
        assert response.times.queue_s > 0.05

    run(test)


def test_cancelled_jobs_leave_the_queue() -> None:
    async def test(fixture: Service) -> None:
        with fixture.engine.paused():
            futures = [fixture.remotes[i % 2].submit(plain(i)) for i in range(4)]
            await until(lambda: queued_count(fixture.engine) == 4)
            counted = [remote.admission.jobs for remote in fixture.remotes]
            assert [jobs.total.requests for jobs in counted] == [2, 2]  # for the queue's limit
            for future in futures[:3]:
                future.cancel()
            await until(lambda: queued_count(fixture.engine) == 1)
        assert (await futures[3]).batch_size == 1
        assert [jobs.total.requests for jobs in counted] == [0, 0]
        futures.clear()
        del future
        for remote in fixture.remotes:
            await fixture.wait_until_free(remote)

    run(test)


def block_engine(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """Returns two events: set when the engine runs a batch, and to let it continue."""
    runs, may_continue = threading.Event(), threading.Event()

    def waits(*arguments: Any) -> Any:
        runs.set()
        assert may_continue.wait(60)
        return launch(*arguments)

    engine.batch_runner.launch = waits
    return runs, may_continue


def test_memory_of_a_running_cancelled_job_stays_allocated() -> None:
    """Until the device has run it."""

    async def test(fixture: Service) -> None:
        runs, may_continue = block_engine(fixture.engine)
        future = fixture.remotes[0].submit(plain(0))
        await asyncio.to_thread(runs.wait)
        future.cancel()
        del future
        await asyncio.sleep(0.1)
        assert not fixture.has_free_memory(fixture.remotes[0])
        may_continue.set()
        await fixture.wait_until_free(fixture.remotes[0])

    run(test)


def test_full_region_raises_503_until_blocks_are_released() -> None:
    async def test(fixture: Service) -> None:
        futures: list[Any] = []
        with fixture.engine.paused():
            futures += [
                fixture.remotes[0].submit(plain(0, width=8192)) for _ in range(9)
            ]  # of 1 MiB, in and out
            with pytest.raises(ServiceUnavailable, match="memory"):
                fixture.remotes[0].submit(plain(0, width=8192))
            # worker 1 has another region
            futures.append(fixture.remotes[1].submit(plain(0, width=8192)))
            assert not futures[-1].done()
        responses = await asyncio.gather(*futures)
        assert len({str(bits(response)) for response in responses}) == 1
        futures.clear()
        with pytest.raises(ServiceUnavailable):  # a result takes memory until it is sent
            fixture.remotes[0].submit(plain(0, width=40000))
        responses.clear()
        await fixture.wait_until_free(fixture.remotes[0])
        await fixture.remotes[0].submit(plain(0, width=40000))
        await fixture.wait_until_free(fixture.remotes[0])

    run(test, 2, 8 << 20)


@pytest.mark.slow
def test_hundreds_of_jobs_leave_no_block_allocated() -> None:
    async def test(fixture: Service) -> None:
        draw = np.random.default_rng(0)
        for _ in range(40):
            sizes = [int(draw.choice([1, 7, 64, 500, 1500])) for _ in range(10)]
            futures = [fixture.remotes[i % 2].submit(plain(i, n)) for i, n in enumerate(sizes)]
            for future in futures[::3]:
                future.cancel()
            responses = await asyncio.gather(*futures, return_exceptions=True)
            assert all(isinstance(a, Result | asyncio.CancelledError) for a in responses)
            del responses, futures, future
        for remote in fixture.remotes:
            await fixture.wait_until_free(remote)
            assert not remote.links[0].transfers

    run(test)


@each_device
def test_errors_equal_those_of_a_local_engine() -> None:
    faults: list[Exception] = [
        InvalidContent("no", pointer="/inputs/query"), ServiceUnavailable("later", retry_after=7),
        MemoryError(), ValueError("a secret"),
    ]  # fmt: skip

    async def test(fixture: Service) -> None:
        for fault in faults:

            def fails(*_: Any, fault: Exception = fault) -> Any:
                raise fault

            fixture.engine.batch_runner.launch = fails
            found: list[QkvError] = []
            for engine in (fixture.engine, fixture.remotes[0]):
                with pytest.raises(QkvError) as caught:
                    await engine.submit(plain(0))
                found.append(caught.value)
            here, there = found
            assert type(here) is type(there)
            assert here.problem() == there.problem()
            assert here.headers() == there.headers()
        assert isinstance(there, Internal)

    run(test)


def test_device_process_records_statistics() -> None:
    async def test(fixture: Service) -> None:
        for remote in fixture.remotes:
            await remote.submit(plain(0))
        found = triton_statistics(fixture.shared_state.counters, "softmax")
        assert (found["inference_count"], found["execution_count"]) == (2, 2)
        assert triton_statistics(fixture.shared_state.counters, "mean")["inference_count"] == 0

    run(test)


def test_pending_jobs_fail_when_the_device_process_ends() -> None:
    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        with fixture.engine.paused():
            small, large = remote.submit(plain(0)), remote.submit(plain(0, width=40000))
            await until(lambda: queued_count(fixture.engine) == 2)
            end_connection(remote)
            for future in (small, large):
                with pytest.raises(ServiceUnavailable, match="ended"):
                    await future
            assert not remote.is_ready
            assert remote.is_alive
        fixture.socket_broker.connect(0)
        await remote.wait_until_ready()
        await remote.submit(plain(0))
        del small, large, future
        await fixture.wait_until_free(remote)

    run(test)


def test_stopped_remote_engine_rejects_jobs() -> None:
    async def test(fixture: Service) -> None:
        future = fixture.remotes[0].submit(plain(0))
        await fixture.remotes[0].stop()
        assert future.done()
        with pytest.raises(ServiceUnavailable, match="stopping"):
            fixture.remotes[0].submit(plain(0))

    run(test)


def test_outputs_are_aligned() -> None:
    async def test(fixture: Service) -> None:
        response = await fixture.remotes[1].submit(
            plain(0, 5, outputs=["output", "weights", "scores"])
        )
        for tensor in response.outputs.values():
            assert torch.frombuffer(tensor.data, dtype=torch.uint8).data_ptr() % 64 == 0

    run(test)


def test_jobs_of_one_turn_are_one_message_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[MessageType] = []
    send = Channel.send

    def record(channel: Channel, kind: MessageType, *parts: Any) -> None:
        kinds.append(kind)
        send(channel, kind, *parts)

    async def test(fixture: Service) -> None:
        monkeypatch.setattr(Channel, "send", record)
        jobs = [plain(seed) for seed in range(9)]
        with fixture.engine.paused():
            futures = [fixture.remotes[0].submit(job) for job in jobs]
            await until(lambda: queued_count(fixture.engine) == 9)
        for job, response in zip(jobs, await asyncio.gather(*futures), strict=True):
            assert bits(response) == bits(await fixture.engine.submit(job))
        # the first job does not wait for the others
        assert kinds == [*[MessageType.RUN] * 2, MessageType.RESULTS]

    run(test)


def record_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list of the numbers of plans that go with each message of jobs."""
    counts, send = list[int](), Channel.send

    def record(channel: Channel, kind: MessageType, *parts: Any) -> None:
        if kind == MessageType.RUN:
            counts.append(sum(request.plan_content is not None for request in parts[0]))
        send(channel, kind, *parts)

    monkeypatch.setattr(Channel, "send", record)
    return counts


def test_plan_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To each device process, from each worker."""
    counts = record_plans(monkeypatch)

    async def test(fixture: Service) -> None:
        one, other = plain(0), plain(0, 5)
        for remote in fixture.remotes:
            for seed in range(3):
                for job in (one, other):
                    again = Job(job.plan, plain(seed, job.plan.inputs.axes.sizes["L"]).tensors)
                    await remote.submit(again)

    run(test)
    assert counts == [1, 1, 0, 0, 0, 0] * 2


@pytest.mark.parametrize(("room", "count"), [(0, 5), (700_000, 90)], ids=["no plan", "some plans"])
def test_plans_that_a_device_process_had_to_drop_travel_again(
    monkeypatch: pytest.MonkeyPatch, room: int, count: int
) -> None:
    monkeypatch.setattr(device_process, "KnownPlans", partial(KnownPlans, max_bytes=room))
    counts = record_plans(monkeypatch)

    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        jobs = [plain(n, n) for n in range(1, count + 1)]
        expected = [bits(await fixture.engine.submit(job)) for job in jobs]
        for _ in range(2):
            results = await asyncio.gather(*[remote.submit(job) for job in jobs])
            assert [bits(result) for result in results] == expected
        assert len(jobs) < sum(counts) <= 2 * len(jobs)
        with fixture.engine.paused():
            lost = remote.submit(jobs[0])
            lost.cancel()  # its plan is not known
            await until(lambda: not remote.links[0].transfers)
        del results, lost
        jobs.clear()  # whose futures have results
        await fixture.wait_until_free(remote)

    run(test)


def test_restarted_processes_get_the_plans_again() -> None:
    async def test(fixture: Service) -> None:
        job = plain(0)
        expected = bits(await fixture.engine.submit(job))
        remote = fixture.remotes[0]
        assert bits(await remote.submit(job)) == expected
        end_connection(remote)
        await until(lambda: not remote.is_ready)
        fixture.socket_broker.connect(0)
        await remote.wait_until_ready()
        assert bits(await remote.submit(job)) == expected
        fixture.remotes[0] = fixture.remote(0)  # as if the worker had ended
        await fixture.remotes[0].wait_until_ready()
        assert bits(await fixture.remotes[0].submit(job)) == expected
        await remote.stop()

    run(test)


def test_job_whose_plan_cannot_be_read_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is a bug, and its client gets an error."""

    async def test(fixture: Service) -> None:
        remote = fixture.remotes[0]
        await remote.submit(plain(0))
        broken = plain(0)
        # a private name: nothing outside the plan can cause this bug
        broken.plan._derived[describe] = PlanDescription(b"key", b"no plan")
        lost = remote.submit(broken)
        right = remote.submit(plain(0))
        with pytest.raises(Internal):
            await lost
        assert bits(await right) == bits(await fixture.engine.submit(plain(0)))

    run(test)


def test_small_jobs_run_at_once_on_a_cpu_without_batches() -> None:
    async def test(fixture: Service) -> None:
        job = plain(0)
        expected = bits(await fixture.engine.submit(job))
        with fixture.engine.paused(small_jobs=False):
            response = await fixture.remotes[0].submit(job)
            assert bits(response) == expected
            assert response.times.queue_s > 0
            late = fixture.remotes[0].submit(job, wait_s=0.0)
            with pytest.raises(DeadlineExceeded):
                await late
            large = fixture.remotes[0].submit(plain(0, 2048))
            await until(lambda: queued_count(fixture.engine) == 1)
        await large

    run(test, device=engines.CPU, stack=False, max_batch=1)
