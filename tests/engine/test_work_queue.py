"""Limits of the queue, throughput estimate, admission and memory budget."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.admission import Admission
from qkv.engine.device_errors import MemoryBudget
from qkv.engine.lane import JobQueue
from qkv.engine.throughput import Throughput
from qkv.errors import ServiceUnavailable
from qkv.jobs.load import Load
from qkv.jobs.tenant import ANYONE
from support.engines import plain, waiting

COUNTS = st.integers(0, 1 << 60)
LOADS = st.builds(Load, COUNTS, COUNTS, COUNTS)


@given(LOADS, LOADS)
def test_minus_reverts_plus(one: Load, other: Load) -> None:
    assert one.plus(other).minus(other) == one


@pytest.mark.parametrize("field", Load._fields)
def test_each_limit_holds_unless_the_queue_is_empty(field: str) -> None:
    limit = Load(10, 10, 10)
    current, added = Load(1, 5, 5), Load(1, 5, 5)._replace(**{field: 10})
    admission, tenant = Admission(limit), ANYONE
    assert admission.refusal(tenant, added) is None
    admission.jobs.take(tenant, current)
    assert "the limit is 10" in str(admission.refusal(tenant, added))
    assert admission.refusal(tenant, Load(1, 5, 5)) is None


def test_every_change_of_the_queue_is_reported() -> None:
    """Metrics and other processes read it."""
    admission, seen = Admission(Load(9, 1 << 40, 1 << 60)), list[Load]()
    admission.on_change = seen.append
    queue, jobs = JobQueue(admission), [waiting(plain(number)) for number in range(3)]
    for job in jobs:
        queue.put(job)
    queue.remove(jobs[0])
    assert queue.take_batch(1, 0) == [jobs[1]]
    queue.clear()
    assert [load.requests for load in seen] == [1, 2, 3, 2, 1, 0]
    assert seen[-1] == Load()


def test_retry_after_is_the_load_divided_by_the_throughput() -> None:
    rate = Throughput()
    assert rate.retry_after(Load(1000, 1000, 1000)) == 1  # no batch has run yet
    for _ in range(100):
        rate.add(Load(4, 400, 40_000), 2.0)  # two requests a second
    assert rate.retry_after(Load()) == 1
    assert rate.retry_after(Load(1, 100, 10_000)) == 1
    assert rate.retry_after(Load(9, 900, 90_000)) == 5  # 4.5
    assert rate.retry_after(Load(9, 900, 300_000)) == 15  # few, but large
    assert rate.retry_after(Load(1 << 40, 0, 0)) == 60


def test_throughput_follows_recent_batches() -> None:
    rate = Throughput()
    for seconds in (10.0, 0.1):
        for _ in range(100):
            rate.add(Load(1, 1, 0), seconds)
    assert rate.retry_after(Load(100, 100, 0)) in (10, 11)


def test_rate_is_that_of_long_batches() -> None:
    rate = Throughput()
    rate.add(Load(64, 64, 1_000_000), 0.001)
    assert rate.flops_per_s is None  # a short batch's time is mostly overhead
    for _ in range(100):
        rate.add(Load(1, 1, 8_000), 2.0)
        rate.add(Load(1, 1, 1), 0.001)
    assert rate.flops_per_s == pytest.approx(4_000)
    rate.reset()
    assert rate.flops_per_s is None
    assert rate.retry_after(Load(1000, 1000, 1000)) == 1


def test_admission_counts_queued_and_incoming_load() -> None:
    admission = Admission(Load(3, 100, 1))
    admission.throughput.add(Load(1, 1000, 1), 7.0)
    with admission.admit(1000):  # nothing else is queued
        with pytest.raises(ServiceUnavailable, match="1000 bytes") as caught:
            admission.admit(1)
        assert caught.value.retry_after == 7
    admission.jobs.take(ANYONE, Load(1, 50, 0))
    with pytest.raises(ServiceUnavailable, match="50 bytes"):
        admission.admit(51)
    with admission.admit(20) as admitted:
        admitted.grow(20)
        with admission.admit(10), pytest.raises(ServiceUnavailable, match="3 requests"):
            admission.admit(0)
        with pytest.raises(ServiceUnavailable, match="90 bytes"):
            admission.admit(11)
    assert admission.bodies.total == Load()


def test_body_that_grows_is_admitted_anew() -> None:
    admission = Admission(Load(3, 100, 1))
    with admission.admit(0) as growing:
        growing.grow(1000)  # there is no other
        admission.jobs.take(ANYONE, Load(1, 50, 0))
        with pytest.raises(ServiceUnavailable, match="50 bytes"):
            growing.grow(1)
        assert admission.bodies.total == Load()
    with admission.admit(0) as growing, admission.admit(20):
        growing.grow(30)
        with pytest.raises(ServiceUnavailable, match="70 bytes"):
            growing.grow(1)
        assert admission.bodies.total == Load(1, 20)
    assert admission.bodies.total == Load()


def test_slow_body_stops_counting() -> None:
    admission = Admission(Load(2, 100, 1))
    with admission.admit(100) as slow:
        with pytest.raises(ServiceUnavailable):
            admission.admit(1)
        admission.body_timeout_s = 0.0
        time.sleep(1e-3)  # 100 bytes may take a tenth of it, at 1 MiB a second
        with admission.admit(60):  # the slow body may still arrive, but no longer counts
            assert admission.bodies.total == Load(1, 60)
            admission.body_timeout_s = 30.0
            with pytest.raises(ServiceUnavailable, match="60 bytes"):
                slow.grow(1)  # unless it grows
        slow.grow(1)
        assert admission.bodies.total == Load(1, 102)
    assert admission.bodies.total == Load()


def test_memory_budget_shrinks_at_once_and_grows_slowly() -> None:
    budget = MemoryBudget(1 << 30)
    budget.lower(1 << 28)
    assert budget.bytes == 1 << 27
    budget.recover(1 << 20)  # too small to count
    assert budget.bytes == 1 << 27
    steps = 0
    while budget.bytes < 1 << 30:
        budget.recover(budget.bytes)
        steps += 1
    assert 30 < steps < 70
    for _ in range(100):
        budget.lower(budget.bytes)
    assert budget.bytes > 0
