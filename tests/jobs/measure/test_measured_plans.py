"""The runs of a comparison: their measurements, and their encoding for another process."""

from __future__ import annotations

import numpy as np
import pytest

from qkv import local
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.plan import Plan
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
def test_every_run_survives_encoding(per_head: bool) -> None:
    inputs = random_inputs() | {"key_lengths": np.array([9, 4])}
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    fields = {"variants": ["linear"], "per_head": per_head}
    request = CompareRequest(Message(fields, raw), UNLIMITED)
    (entry,) = request.variants
    for plan in (
        entry.plan,
        entry.plan.measured(peak=True),
        entry.plan.measured(float64=True),
        entry.rows_plan([0, 3]),
    ):
        job = Job(plan, entry.tensors)
        decoded = send(job)
        assert decoded.plan.measurement == plan.measurement
        assert decoded.batch_key != job.batch_key
        assert decoded.plan.output_specs == plan.output_specs
        one, other = (execute([j], CpuDevice(), False)[0] for j in (job, decoded))
        assert one.outputs.keys() == other.outputs.keys() == plan.output_specs.keys()
        assert all(bytes(x.data) == bytes(other.outputs[n].data) for n, x in one.outputs.items())
        assert one.peak_bytes == other.peak_bytes


def test_measured_jobs_run_alone_and_are_no_inferences() -> None:
    raw = {name: RawTensor.from_numpy(array) for name, array in random_inputs().items()}
    plan = Plan.from_message("softmax", Message({}, raw), UNLIMITED)
    timing = plan.measured()
    assert Job(timing, raw).batch_key != Job(timing, raw).batch_key
    assert Job(plan, raw).batch_key == Job(plan, raw).batch_key
    assert plan.is_inference
    assert not timing.is_inference
    assert plan.is_small
    assert not timing.is_small


def test_reference_is_the_run_of_float64_inputs() -> None:
    arrays = random_inputs()
    wide = {name: RawTensor.from_numpy(array.astype("f8")) for name, array in arrays.items()}
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    plan = Plan.from_message("softmax", Message({}, raw), UNLIMITED).measured(float64=True)
    (found,) = execute([Job(plan, raw)], CpuDevice(), False)
    right = local.attend("softmax", Message({}, wide)).tensors
    assert found.outputs.keys() == right.keys()
    for name, tensor in found.outputs.items():
        assert tensor.dtype == "float64"
        assert bytes(tensor.data) == bytes(right[name].data)
    assert found.peak_bytes == 0
