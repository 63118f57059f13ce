"""The jobs of a comparison: what they measure, and that they cross to another process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.engine import local
from qkv.engine.executor import execute
from qkv.engine.remote.job_codec import (
    JobDecoder,
    aligned_bytes,
    aligned_slices,
    encode_header,
    input_sizes,
    write_tensors,
)
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.probe_jobs import PEAK_BYTES, PeakMemoryJob, TimingJob, measure_peak_bytes
from qkv.jobs.measure.row_divergence import RowDivergenceJob
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.compare_requests import UNLIMITED, compare, random_inputs, variant_entry


def test_the_cost_is_that_of_a_run_of_the_output() -> None:
    inputs = random_inputs()
    entry = compare(inputs, variants=["linear"], repeats=3)["variants"][0]
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    alone = local.attend("linear", Message({"outputs": ["output"]}, raw)).fields["timing"]
    assert {n: entry[n] for n in ("flops", "bytes")} == {n: alone[n] for n in ("flops", "bytes")}
    times = entry["timing"]
    assert times["repeats"] == 3
    assert 0 < times["least_ms"] <= times["median_ms"] <= times["most_ms"]


def test_peaks_are_what_torch_held() -> None:
    cpu = torch.device("cpu")

    def work() -> torch.Tensor:
        one, other = torch.empty(1 << 20), torch.empty(1 << 20)
        del one
        return torch.cat([other, torch.empty(1 << 19)])

    before = torch.zeros(1 << 10)
    assert measure_peak_bytes(work, cpu) == 4 * ((1 << 20) + (1 << 19) + (1 << 20) + (1 << 19))
    assert measure_peak_bytes(lambda: before, cpu) == 0
    with pytest.raises(ZeroDivisionError):
        measure_peak_bytes(lambda: 1 / 0, cpu)
    assert measure_peak_bytes(lambda: torch.empty(8), cpu) == 32


@pytest.mark.gpu
def test_peaks_are_what_torch_held_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cuda = torch.device("cuda")
    held = measure_peak_bytes(
        lambda: torch.empty(1 << 20, device=cuda) + torch.empty(1 << 20, device=cuda), cuda
    )
    assert held == 12 << 20


def test_a_peak_has_no_matrix_of_scores() -> None:
    inputs = random_inputs(B=1, N=1024)
    softmax = compare(inputs, variants=["softmax"], rows=0)["variants"][0]["peak_bytes"]
    loud = compare(inputs, variants=[variant_entry("softmax", softcap=3.0)], rows=0)["variants"][0]
    output = 4 * inputs["value"].size
    assert output <= softmax < 1024 * 1024 * 4
    assert softmax < loud["peak_bytes"]


def test_every_kind_of_job_is_the_same_on_the_other_side() -> None:
    inputs = random_inputs() | {"key_lengths": np.array([9, 4])}
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    asked = CompareRequest(Message({"variants": ["linear"]}, raw), UNLIMITED)
    (entry,) = asked.variants
    for job in (entry.timing, entry.peak_memory, asked.float64_job, *asked.divergence_jobs(entry)):
        data = np.zeros(aligned_bytes(input_sizes(job)), np.uint8)
        write_tensors(job, data)
        opened = JobDecoder(UNLIMITED).decode(encode_header(job), data)
        assert type(opened) is type(job)
        assert opened.batch_key != job.batch_key
        assert opened.output_specs == job.output_specs
        one, other = (execute([j], torch.device("cpu"), False)[0].outputs for j in (job, opened))
        assert one.keys() == other.keys() == job.output_specs.keys()
        assert all(bytes(one[n].data) == bytes(other[n].data) for n in one)
    assert len(list(aligned_slices(input_sizes(entry.timing)))) == 4


def test_what_is_measured_runs_alone_and_is_no_inference() -> None:
    raw = {name: RawTensor.from_numpy(array) for name, array in random_inputs().items()}
    one, other = (
        TimingJob.from_job(Job.from_message("softmax", Message({}, raw), UNLIMITED)) for _ in "12"
    )
    assert one.batch_key != other.batch_key
    assert one.with_tensors(raw).batch_key != one.batch_key
    kinds = (TimingJob, PeakMemoryJob, RowDivergenceJob)
    assert Job.is_inference
    assert not any(kind.is_inference for kind in kinds)
    assert PeakMemoryJob.from_job(one).output_specs == {PEAK_BYTES: ("int64", (1,))}
