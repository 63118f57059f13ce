"""Several tenants share one queue by their weights, and each its limit."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.admission import Admission
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.engine.lane import JobQueue, Lane, VirtualTimes
from qkv.errors import DeadlineExceeded, ServiceUnavailable, TooManyRequests
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.tenant import ANYONE, Tenant
from support.engines import new_job, plain, waiting, with_engine
from support.raw_connection import random_inputs
from support.remote_service import Service, queued_count, run, until
from support.remote_service import plain as plain_of

ALICE: Final = Tenant("alice", 3.0)
BATCH: Final = Tenant("batch")
NO_LIMIT: Final = Load(1 << 20, 1 << 60, 1 << 60)


def new_queue() -> JobQueue:
    return JobQueue(Admission(NO_LIMIT))


def queued(tenant: Tenant, lengths: Sequence[int]) -> list[Job]:
    """Returns jobs of a tenant; those of one length have equal batch keys."""
    return [waiting(new_job(random_inputs(0, (1, 1, length, 4))), tenant) for length in lengths]


def drain(queue: JobQueue, max_jobs: int = 1) -> list[list[Job]]:
    """Takes all batches of a queue."""
    batches = []
    while batch := queue.take_batch(max_jobs, 1 << 60):
        batches.append(batch)
    return batches


def test_single_job_does_not_wait_for_the_flood_of_another_tenant() -> None:
    queue = new_queue()
    flood, single = queued(BATCH, range(1, 41)), queued(ALICE, [100])
    for job in flood:
        queue.put(job)
    running = queue.take_batch(1, 0)
    queue.put(single[0])
    assert running + [job for batch in drain(queue) for job in batch] == [
        *(flood[0], single[0]),
        *flood[1:],
    ]


def test_tenant_that_joins_after_many_small_jobs_has_no_credit() -> None:
    times = VirtualTimes()
    lane = Lane(times)

    def put(*tenants: Tenant) -> None:
        for tenant in tenants:
            times.join(tenant)
            for job in queued(tenant, [4] * 10):
                lane.put(job)

    late = Tenant("late")
    put(BATCH, Tenant("other"))
    assert len(lane.take_turn(20)) == 20
    put(BATCH, late)
    turns = Counter(job.tenant for job in lane.take_turn(10))
    assert abs(turns[late] - turns[BATCH]) <= 2


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 0.5]), min_size=2, max_size=4))
def test_tenants_run_in_proportion_to_their_weights(weights: list[float]) -> None:
    """After any number of equal jobs, each is at most about one job from its share."""
    queue = new_queue()
    tenants = [Tenant(f"key{place}", weight) for place, weight in enumerate(weights)]
    for tenant in tenants:
        for job in queued(tenant, [4] * 12):
            queue.put(job)
    done = Counter[Tenant]()
    for batch in drain(queue)[:12]:
        done[batch[0].tenant] += 1
        spread = [done[tenant] / tenant.weight for tenant in tenants]
        assert max(spread) - min(spread) <= 1 / min(weights) + 1e-9


def test_shares_are_of_work_and_not_of_requests() -> None:
    queue, equal = new_queue(), Tenant("other")
    large, small = queued(BATCH, [256] * 4), queued(equal, [8] * 40)
    for job in large + small:
        queue.put(job)
    order = [batch[0] for batch in drain(queue)]
    before_last_large = order[: order.index(large[-1])]
    between = [job for job in before_last_large if job.tenant == equal]
    work = sum(job.plan.load.work for job in between)
    assert work == pytest.approx(3 * large[0].plan.load.work, abs=large[0].plan.load.work)
    assert len(between) > 3


def test_idle_tenant_saves_nothing() -> None:
    queue = new_queue()
    for job in queued(BATCH, [4] * 50):
        queue.put(job)
    drain(queue)
    other = Tenant("other")
    for job in queued(BATCH, [4] * 10) + queued(other, [4] * 10):
        queue.put(job)
    names = [batch[0].tenant.name for batch in drain(queue)]
    assert abs(names[:10].count("batch") - 5) <= 1


def test_jobs_of_several_tenants_are_one_batch() -> None:
    queue = new_queue()
    for job in queued(BATCH, [4] * 40) + queued(ALICE, [4] * 40):
        queue.put(job)
    batches = drain(queue, 8)
    assert [len(batch) for batch in batches] == [8] * 10
    for batch in batches[:4]:  # 3 to 1
        counts = Counter(job.tenant.name for job in batch)
        assert counts == {"alice": 6, "batch": 2}


def test_priority_is_before_shares() -> None:
    queue = new_queue()
    late = [waiting(plain(1), BATCH, 1) for _ in range(3)]
    for job in [*queued(ALICE, [4] * 3), *late]:
        queue.put(job)
    names = [batch[0].tenant.name for batch in drain(queue)]
    assert names == ["batch"] * 3 + ["alice"] * 3


def test_cancelled_jobs_cost_their_tenant_nothing() -> None:
    queue = new_queue()
    cancelled = queued(BATCH, [4] * 10)
    for job in cancelled:
        queue.put(job)
        job.future.cancel()
    rest = [*queued(BATCH, [4] * 2), *queued(Tenant("other"), [4] * 2)]
    for job in rest:
        queue.put(job)
    assert sorted(b[0].tenant.name for b in drain(queue)[:2]) == ["batch", "other"]
    assert len(queue) == 0


def one_request_a_second(limit: Load) -> Admission:
    admission = Admission(limit)
    admission.throughput.add(Load(1, 0, 0), 1.0)
    return admission


def test_lone_tenant_may_use_the_whole_limit() -> None:
    admission = one_request_a_second(Load(8, 800, 800))
    for _ in range(8):
        assert admission.refusal(BATCH, Load(1, 100, 100)) is None
        admission.jobs.take(BATCH, Load(1, 100, 100))
    error = admission.refusal(BATCH, Load(1, 0, 0))
    assert isinstance(error, ServiceUnavailable)
    assert error.retry_after == 8


def test_tenants_that_compete_have_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one came first, and has filled the queue. A share ends some time after its use."""
    admission = one_request_a_second(Load(8, 800, 800))
    one = Load(1, 100, 100)
    for _ in range(8):
        admission.jobs.take(BATCH, one)
    for _ in range(6):  # three quarters of 8
        assert admission.refusal(ALICE, one) is None
        admission.jobs.take(ALICE, one)
    for tenant, share, retry_after in ((ALICE, 6, 8), (BATCH, 2, 32)):
        error = admission.refusal(tenant, one)
        assert isinstance(error, TooManyRequests)
        assert tenant.name in str(error)
        assert f"the limit is {share}" in str(error)
        assert error.retry_after == retry_after  # seconds, at its share of one request a second
    for _ in range(6):
        admission.jobs.give_back(ALICE, one)
    for _ in range(6):
        admission.jobs.give_back(BATCH, one)
    assert isinstance(admission.refusal(BATCH, one), TooManyRequests)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert admission.refusal(BATCH, one) is None


def test_request_larger_than_its_share_fits_if_there_is_room() -> None:
    admission = Admission(Load(8, 800, 800))
    admission.jobs.take(ALICE, Load(1, 100, 100))
    assert admission.refusal(BATCH, Load(1, 600, 0)) is None
    assert isinstance(admission.refusal(BATCH, Load(1, 750, 0)), TooManyRequests)


def test_load_of_many_tenants_is_at_most_twice_the_limit() -> None:
    admission = Admission(Load(100, 10_000, 10_000))
    one = Load(1, 1, 1)
    for place in range(40):
        tenant = Tenant(f"key{place}")
        while (error := admission.refusal(tenant, one)) is None:
            admission.jobs.take(tenant, one)
    assert admission.jobs.total.requests == 200
    assert isinstance(error, ServiceUnavailable)


def test_tenant_whose_weight_has_changed_does_not_compete_with_itself() -> None:
    admission = Admission(Load(8, 800, 800))
    for _ in range(4):
        admission.jobs.take(Tenant("alice", 1.0), Load(1))
    for _ in range(4):
        assert admission.refusal(Tenant("alice", 2.0), Load(1)) is None
        admission.jobs.take(Tenant("alice", 2.0), Load(1))
    assert isinstance(admission.refusal(Tenant("alice", 2.0), Load(1)), ServiceUnavailable)


def test_shares_hold_after_any_amount_of_work() -> None:
    """Here 1e19 floating-point operations of each, with a weight of one."""
    queue, few, many = new_queue(), Tenant("few", 1e-3), Tenant("many", 3e-3)
    for tenant in (few, many):
        large = waiting(plain(), tenant)
        large.plan.__dict__["load"] = Load(0, 0, int(1e19 * tenant.weight))
        queue.put(large)
    assert len(drain(queue)) == 2
    small = plain()
    for _ in range(1000):
        for tenant in (few, many, many, many):
            queue.put(waiting(Job(small.plan, small.tensors), tenant))
    ran = Counter(job.tenant for (job,) in drain(queue)[:2000])
    assert ran[many] == 3 * ran[few]


def test_small_job_behind_those_of_others_has_its_wait_and_its_deadline() -> None:
    async def test(engine: Engine) -> None:
        flood = [engine.submit(new_job(random_inputs(seed)), tenant=BATCH) for seed in range(64)]
        waits = [engine.submit(plain(0), tenant=Tenant("least", 1e-3)) for _ in range(2)]
        late = engine.submit(plain(0), tenant=Tenant("late", 1e-3), wait_s=0.0)
        with pytest.raises(DeadlineExceeded):
            await late
        first, second = await asyncio.gather(*waits)
        await asyncio.gather(*flood)
        assert 0 < first.times.queue_s < second.times.queue_s

    with_engine(test)


def test_small_jobs_on_the_event_loop_take_turns_by_weight() -> None:
    order: list[Job] = []

    def recorded(jobs: Sequence[Job], *arguments: Any) -> Launched:
        order.extend(jobs)
        return launch(jobs, *arguments)

    async def test(engine: Engine) -> None:
        engine.batch_runner.launch = recorded
        of = {
            tenant: [new_job(random_inputs(seed)) for seed in range(32)]
            for tenant in (BATCH, ALICE)
        }
        await asyncio.gather(
            *[engine.submit(job, tenant=tenant) for tenant, jobs in of.items() for job in jobs]
        )
        assert len(order) == 64
        assert sum(job in of[ALICE] for job in order[:40]) in range(29, 32)

    with_engine(test)


@pytest.mark.parametrize("stack", [True, False])
def test_tenants_share_a_device_process(stack: bool) -> None:
    """Its queue has the jobs of all workers."""
    ran: list[int] = []

    def recorded(jobs: Sequence[Job], *arguments: Any) -> Launched:
        ran.extend(job.plan.inputs.shapes["query"][2] for job in jobs)
        return launch(jobs, *arguments)

    async def test(service: Service) -> None:
        device = service.engine
        device.batch_runner.launch = recorded
        remotes = service.remotes
        with device.paused():
            flood = [remotes[i % 2].submit(plain_of(i, 4), tenant=BATCH) for i in range(12)]
            await until(lambda: queued_count(device) == 12)
            single = remotes[0].submit(plain_of(0, 5), tenant=ALICE)
            await until(lambda: queued_count(device) == 13)
        await asyncio.gather(single, *flood)
        assert ran.index(5) <= 2  # in the second batch at the latest

    run(test, max_batch=2, stack=stack)


def test_tenant_of_a_service_without_keys_has_no_name() -> None:
    assert waiting(plain(0)).tenant == ANYONE
    assert (ANYONE.name, ANYONE.weight) == ("", 1.0)
