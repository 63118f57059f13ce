"""Plans that a worker sends to the device process once, by number."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.engine.remote.job_codec import JobDecoder
from qkv.engine.remote.sent_plans import NOT_KEPT, SentPlans
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.plan_cache import BodyPlan, PlanCache
from qkv.tensors import RawTensor
from qkv.wire.message import Message

LIMITS = Limits(response_bytes=1 << 30, job_bytes=1 << 30)


def message(length: int = 4, seed: int = 0, **fields: object) -> Message:
    draw = np.random.default_rng(seed)
    shapes = {"query": 3, "key": length, "value": length}
    tensors = {
        name: RawTensor.from_numpy(draw.normal(size=(1, 2, n, 8)).astype(np.float32))
        for name, n in shapes.items()
    }
    return Message({"outputs": ["output"]} | fields, tensors)


def job(length: int = 4) -> Job:
    """Returns a job without a plan."""
    return Job.from_message("softmax", message(length), LIMITS)


def test_header_is_sent_once_for_each_plan() -> None:
    plans, cache = SentPlans(), PlanCache(LIMITS)
    for length in (4, 5):
        jobs = [cache.new_job(Job, "softmax", message(length, seed)) for seed in range(3)]
        found = [plans.find(each) for each in jobs]
        assert [header is not None for _, header in found] == [True, False, False]
        assert len({plan.number for plan, _ in found}) == 1


def test_jobs_without_a_plan_share_one_if_their_headers_are_equal() -> None:
    plans = SentPlans()
    (one, header), (other, nothing) = plans.find(job()), plans.find(job())
    assert one is other
    assert header is not None
    assert nothing is None


def test_plan_that_was_not_used_for_longest_loses_its_number() -> None:
    plans = SentPlans(3)
    numbers = {n: plans.find(job(n))[0].number for n in (1, 2, 3)}
    assert len(set(numbers.values())) == 3
    assert NOT_KEPT not in numbers.values()
    assert plans.find(job(1))[1] is None
    plan, header = plans.find(job(4))
    assert (plan.number, header is not None) == (numbers[2], True)
    assert plans.find(job(1))[1] is None
    assert plans.find(job(3))[1] is None
    assert plans.find(job(2)) != (plan, None)


def test_row_comparisons_are_not_kept() -> None:
    """Their headers do not repeat."""
    request = CompareRequest(Message({"variants": ["linear"]}, message().tensors), LIMITS)
    (entry,) = request.variants
    plans = SentPlans()
    for divergence in request.divergence_jobs(entry):
        for _ in range(2):
            plan, header = plans.find(divergence)
            assert plan.number == NOT_KEPT
            assert header is not None


@pytest.mark.parametrize("order", [("query", "key", "value"), ("value", "query", "key")])
def test_tensors_keep_their_names_in_any_order_of_the_body(order: tuple[str, ...]) -> None:
    sent = message()
    cache, plans = PlanCache(LIMITS), SentPlans()
    first = cache.new_job(Job, "softmax", sent)
    plan, header = plans.find(first)
    assert header is not None
    body = {name: sent.tensors[name] for name in order}
    data = b"".join(bytes(tensor.data) for tensor in body.values())
    second = BodyPlan(first, body).new_job(memoryview(data))
    assert plans.find(second) == (plan, None)
    decoded = JobDecoder(LIMITS).plan(header)
    for each in (first, second):
        memory = np.zeros(plan.input_bytes, np.uint8)
        plan.write_inputs(each, memory)
        received = decoded.new_job(memory).inputs.tensors
        assert {n: bytes(t.data) for n, t in received.items()} == {
            n: bytes(t.data) for n, t in sent.tensors.items()
        }


def test_decoded_jobs_of_a_plan_have_equal_batch_keys() -> None:
    decoder = JobDecoder(LIMITS)
    plan, header = SentPlans().find(job())
    assert header is not None
    memory = np.zeros(plan.input_bytes, np.uint8)
    jobs = [decoder.plan(header).new_job(memory) for _ in range(3)]
    assert len({each.batch_key for each in jobs}) == 1
