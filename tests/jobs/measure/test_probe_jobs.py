"""The jobs of a comparison: what they measure, and that they cross to another process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.engine import local
from qkv.engine.executor import run
from qkv.engine.remote.job_codec import Opener, head_of, laid_out, room_for, sizes_in, write
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_request import Comparison
from qkv.jobs.measure.probe_jobs import PEAK, PeakJob, TimedJob, peak_of
from qkv.jobs.measure.row_divergence import DivergenceJob
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.compare_requests import UNLIMITED, compare, drawn, named


def test_the_cost_is_that_of_a_run_of_the_output() -> None:
    inputs = drawn()
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
    assert peak_of(work, cpu) == 4 * ((1 << 20) + (1 << 19) + (1 << 20) + (1 << 19))
    assert peak_of(lambda: before, cpu) == 0
    with pytest.raises(ZeroDivisionError):
        peak_of(lambda: 1 / 0, cpu)
    assert peak_of(lambda: torch.empty(8), cpu) == 32


@pytest.mark.gpu
def test_peaks_are_what_torch_held_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cuda = torch.device("cuda")
    held = peak_of(
        lambda: torch.empty(1 << 20, device=cuda) + torch.empty(1 << 20, device=cuda), cuda
    )
    assert held == 12 << 20


def test_a_peak_has_no_matrix_of_scores() -> None:
    inputs = drawn(B=1, N=1024)
    softmax = compare(inputs, variants=["softmax"], rows=0)["variants"][0]["peak_bytes"]
    loud = compare(inputs, variants=[named("softmax", softcap=3.0)], rows=0)["variants"][0]
    output = 4 * inputs["value"].size
    assert output <= softmax < 1024 * 1024 * 4
    assert softmax < loud["peak_bytes"]


def test_every_kind_of_job_is_the_same_on_the_other_side() -> None:
    inputs = drawn() | {"key_lengths": np.array([9, 4])}
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    asked = Comparison(Message({"variants": ["linear"]}, raw), UNLIMITED)
    (contender,) = asked.variants
    for job in (contender.timed, contender.peak, asked.exact, *asked.divergences(contender)):
        data = np.zeros(room_for(sizes_in(job)), np.uint8)
        write(job, data)
        opened = Opener(UNLIMITED).open(head_of(job), data)
        assert type(opened) is type(job)
        assert opened.key != job.key
        assert opened.answers == job.answers
        one, other = (run([j], torch.device("cpu"), False)[0].outputs for j in (job, opened))
        assert one.keys() == other.keys() == job.answers.keys()
        assert all(bytes(one[n].data) == bytes(other[n].data) for n in one)
    assert len(list(laid_out(sizes_in(contender.timed)))) == 4


def test_what_is_measured_runs_alone_and_is_no_inference() -> None:
    raw = {name: RawTensor.from_numpy(array) for name, array in drawn().items()}
    one, other = (TimedJob.like(Job.of("softmax", Message({}, raw), UNLIMITED)) for _ in "12")
    assert one.key != other.key
    assert one.again(raw).key != one.key
    kinds = (TimedJob, PeakJob, DivergenceJob)
    assert Job.is_inference
    assert not any(kind.is_inference for kind in kinds)
    assert PeakJob.like(one).answers == {PEAK: ("int64", (1,))}
