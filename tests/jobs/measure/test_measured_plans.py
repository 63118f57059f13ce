"""The jobs of a comparison: their measurements, and their encoding for another process."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.engine import local
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.plan import PEAK_BYTES, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.compare_requests import UNLIMITED, compare, random_inputs, variant_entry
from support.sent_jobs import send


def test_cost_is_that_of_a_run_with_output_alone() -> None:
    inputs = random_inputs()
    entry = compare(inputs, variants=["linear"], repeats=3)["variants"][0]
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    alone = local.attend("linear", Message({"outputs": ["output"]}, raw)).fields["timing"]
    assert {n: entry[n] for n in ("flops", "bytes")} == {n: alone[n] for n in ("flops", "bytes")}
    times = entry["timing"]
    assert times["repeats"] == 3
    assert 0 < times["least_ms"] <= times["median_ms"] <= times["most_ms"]


def test_peak_has_no_matrix_of_scores() -> None:
    inputs = random_inputs(B=1, N=1024)
    softmax = compare(inputs, variants=["softmax"], rows=0)["variants"][0]["peak_bytes"]
    explicit = compare(inputs, variants=[variant_entry("softmax", softcap=3.0)], rows=0)[
        "variants"
    ][0]
    output = 4 * inputs["value"].size
    assert output <= softmax < 1024 * 1024 * 4
    assert softmax < explicit["peak_bytes"]


@pytest.mark.parametrize("per_head", [False, True])
def test_every_task_survives_encoding(per_head: bool) -> None:
    inputs = random_inputs() | {"key_lengths": np.array([9, 4])}
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    fields = {"variants": ["linear"], "per_head": per_head}
    request = CompareRequest(Message(fields, raw), UNLIMITED)
    (entry,) = request.variants
    for job in (
        entry.timing,
        entry.peak_memory,
        request.float64_job,
        *request.divergence_jobs(entry),
    ):
        decoded = send(job)
        assert decoded.plan.task == job.plan.task
        assert decoded.batch_key != job.batch_key
        assert decoded.plan.output_specs == job.plan.output_specs
        one, other = (execute([j], CpuDevice(), False)[0].outputs for j in (job, decoded))
        assert one.keys() == other.keys() == job.plan.output_specs.keys()
        assert all(bytes(one[n].data) == bytes(other[n].data) for n in one)


def test_measured_jobs_run_alone_and_are_no_inferences() -> None:
    raw = {name: RawTensor.from_numpy(array) for name, array in random_inputs().items()}
    plan = Plan.from_message("softmax", Message({}, raw), UNLIMITED)
    timing = plan.measured("time")
    assert Job(timing, raw).batch_key != Job(timing, raw).batch_key
    assert Job(plan, raw).batch_key == Job(plan, raw).batch_key
    assert not plan.is_measurement
    assert timing.is_measurement
    assert plan.measured("peak").output_specs == {PEAK_BYTES: ("int64", (1,))}
