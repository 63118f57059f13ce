"""Batches: the same bits as alone if run one by one, the same numbers if stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qkv.jobs.job import Job
from qkv.tensors import RawTensor
from support.drawn_requests import Request, requests
from support.engines import EngineRunner, bits, job_of, plain
from support.examples import examples
from support.tolerances import assert_within
from support.variant_calls import VARIANTS


@pytest.fixture(scope="module")
def runner() -> Iterator[EngineRunner]:
    """Returns an engine that runs the jobs of a batch one by one, as on a CPU."""
    bench = EngineRunner()
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def stacked() -> Iterator[EngineRunner]:
    """Returns an engine that runs a batch as one call, as on a GPU."""
    bench = EngineRunner(stack=True)
    yield bench
    bench.close()


def job_from(
    request: Request, outputs: Sequence[str], rank: int = 4, like: Job | None = None
) -> Job:
    """Returns the job of a drawn request, with tensors of `rank` axes.

    It shares the tensors without axis B with the job that it is like, so that their batch keys are
    equal.
    """
    axes = {4: (), 3: (1,), 2: (0, 0)}[rank]
    sent = request.named_tensors()
    for name in sent.keys() & {"query", "key", "value", "mask"}:
        for axis in axes:
            sent[name] = sent[name].squeeze(axis)
    job = job_of(sent, outputs, **request.parameters)
    shared = {n: x for n, x in like.tensors.items() if not job.plan.has_batch(n)} if like else {}
    return Job(job.plan, {**job.tensors, **shared}, job.layer)


def jobs_from(
    requests: Sequence[Request], outputs: Sequence[str], ranks: Sequence[int]
) -> list[Job]:
    """Returns jobs with equal batch keys."""
    first = job_from(requests[0], outputs, ranks[0])
    others = zip(requests[1:], ranks[1:], strict=True)
    return [first, *(job_from(request, outputs, rank, first) for request, rank in others)]


def tensor_of(raw: RawTensor) -> Tensor:
    """Returns an output as a torch tensor; bfloat16 as float32."""
    array = raw.numpy()
    return torch.from_numpy(array.astype(np.float32) if raw.dtype == "bfloat16" else array.copy())


SOFTMAX: Final = requests(VARIANTS["softmax"])
OUTPUTS: Final = (("output",), ("output", "weights"), ("weights",), ("output", "weights", "scores"))


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Request], tuple[str, ...]]:
    """Draws requests with equal batch keys, but other numbers, batch sizes and key lengths."""
    first = draw(SOFTMAX)
    group = []
    for _ in range(draw(st.integers(2, 4))):
        sizes = {**first.sizes, "B": draw(st.integers(1, 4))}
        seed = draw(st.integers(0, 2**32 - 1))
        group.append(replace(first, sizes=sizes, item_seed=seed))
    return group, draw(st.sampled_from(OUTPUTS))


# ---------------------------------------------------------------- the same bits


@pytest.mark.slow
@pytest.mark.representative
@examples(300)
@given(groups(), st.randoms(use_true_random=False))
def test_same_bits_alone_and_in_a_batch(
    runner: EngineRunner, group: tuple[list[Request], tuple[str, ...]], random: Any
) -> None:
    """Draws shapes, dtypes, parameters and order; jobs with other batch keys are in between."""
    members, outputs = group
    ranks = []
    for request in members:
        possible = [4]
        if request.sizes["H"] == 1:
            possible += [3] + [2] * (request.sizes["B"] == 1)
        ranks.append(random.choice(possible))
    jobs = jobs_from(members, outputs, ranks)
    assert len({job.batch_key for job in jobs}) == 1
    others = [plain(seed) for seed in range(2)]
    order = random.sample(range(len(jobs) + 2), len(jobs) + 2)
    all_jobs = jobs + others
    alone = runner.run_alone(jobs)
    found = runner.run_together([all_jobs[i] for i in order])
    for i, result in zip(order, found, strict=True):
        size = len(jobs) if i < len(jobs) else len(others)
        assert result.batch_size >= size  # more if the batch keys happen to be equal
        if i < len(jobs):
            assert alone[i].batch_size == 1
            assert bits(result) == bits(alone[i])
            assert result.backend == alone[i].backend


def layer_group(seed: int) -> list[Job]:
    """Returns jobs that share one layer object."""
    random = np.random.default_rng(seed)
    layout = str(random.choice(["v1", "v2"]))
    M, G, K, D, E, L, S = (int(n) for n in random.choice([1, 2, 3, 5, 7, 16, 33], 7))
    G, K = min(G, 3), min(K, 3)
    dtype = np.dtype(random.choice(["float64", "float32", "float16"]))
    tensors = {}
    for name, out in (("query", G * K * D), ("key", G * D), ("value", G * E)):
        weight = random.normal(0, M**-0.5, (M, out)).astype(dtype)
        tensors.update({f"W_{name}": weight} if layout == "v1" else {f"W_{name}.weight": weight.T})
        if layout == "v2" and random.random() < 0.5:
            tensors[f"W_{name}.bias"] = random.normal(size=out).astype(dtype)
    layer = {"layout": layout, "heads": G * K, "tensors": tensors}
    choices: list[dict[str, Any]] = [{}, {"causal": True}, {"dropout": 0.4, "seed": seed}]
    parameters = choices[int(random.integers(3))]
    outputs = OUTPUTS[int(random.integers(len(OUTPUTS)))]
    one = bool(random.integers(2))
    jobs = []
    for _ in range(int(random.integers(2, 5))):
        B = int(random.integers(1, 5))
        lengths = {"x": L} if one else {"query": L, "key": S, "value": S}
        sent = {n: random.normal(size=(B, size, M)).astype(dtype) for n, size in lengths.items()}
        jobs.append(job_of(sent, outputs, layer, **parameters))
    return [jobs[0], *(with_layer(job, jobs[0]) for job in jobs[1:])]


def with_layer(job: Job, other: Job) -> Job:
    """Returns the job with the layer object of the other job."""
    return Job(job.plan, job.tensors, other.layer)


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_same_bits_with_layers(runner: EngineRunner, first: int) -> None:
    """Projections do not depend on other jobs of the batch: 150 layers of many widths."""
    for seed in range(first, first + 25):
        jobs = layer_group(seed)
        alone, grouped = runner.run_alone(jobs), runner.run_together(jobs)
        for one, result in zip(alone, grouped, strict=True):
            assert result.batch_size == len(jobs)
            assert bits(result) == bits(one), f"seed {seed}"


def moved(raw: RawTensor, offset: int, writeable: bool = True) -> RawTensor:
    """Returns the tensor in a buffer that begins `offset` bytes after a 64-byte boundary."""
    room = np.empty(raw.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + offset
    there = room[start : start + raw.nbytes]
    there[:] = np.frombuffer(raw.data, np.uint8)
    there.flags.writeable = writeable
    return RawTensor(raw.dtype, raw.shape, there.data)


def at(job: Job, offsets: Mapping[str, int], writeable: bool = True) -> Job:
    """Returns the job with each tensor so many bytes after an aligned address."""
    tensors = {n: moved(t, offsets[n], writeable) for n, t in job.tensors.items()}
    return Job(job.plan, tensors, job.layer)


@examples(80)
@given(SOFTMAX, st.lists(st.integers(0, 63), min_size=7, max_size=7), st.booleans())
def test_bits_do_not_depend_on_buffer_alignment(
    runner: EngineRunner, request: Request, offsets: list[int], writeable: bool
) -> None:
    """Tensors at any address of a body give the bits of aligned tensors."""
    job = job_from(request, ("output", "weights"))
    names = list(job.tensors)
    shifts = dict(zip(names, offsets, strict=False))
    aligned = at(job, dict.fromkeys(names, 0))
    anywhere = at(job, shifts, writeable)
    first, second = runner.run_alone([aligned, anywhere])
    assert bits(first) == bits(second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("H", "N", "D"), [(3, 33, 65), (1, 64, 64), (2, 16, 16), (33, 65, 8), (1, 200, 16)]
)
def test_bits_do_not_depend_on_alignment_of_larger_buffers(
    runner: EngineRunner, dtype: torch.dtype, H: int, N: int, D: int
) -> None:
    """Tests shapes whose bits depend on alignment unless the engine aligns them."""
    tensors = {n: torch.randn(1, H, N, D).to(dtype) for n in ("query", "key", "value")}
    for outputs in (("output",), ("output", "weights")):
        job = job_of(tensors, outputs)
        jobs = [at(job, dict.fromkeys(tensors, offset)) for offset in (0, 4, 8, 16, 24, 32, 48)]
        first, *others = runner.run_alone(jobs)
        assert all(bits(other) == bits(first) for other in others)


@examples(50)
@given(SOFTMAX)
def test_inputs_are_never_written_to(runner: EngineRunner, request: Request) -> None:
    """Inputs are views of the request's buffers."""
    job = job_from(request, ("output", "weights", "scores"))
    ready = at(job, dict.fromkeys(job.tensors, 0))
    before = {n: bytes(t.data) for n, t in ready.tensors.items()}
    runner.run_alone([ready])
    assert {n: bytes(t.data) for n, t in ready.tensors.items()} == before


# ---------------------------------------------------------------- stacked, as on a GPU


@pytest.mark.slow
@examples(60)
@given(groups())
def test_stacked_jobs_match_the_reference(
    stacked: EngineRunner, group: tuple[list[Request], tuple[str, ...]]
) -> None:
    """Compares with the reference within rounding, with masks, key lengths and dropout."""
    members, _ = group
    jobs = jobs_from(members, ("output", "weights", "scores"), [4] * len(members))
    found, alone = stacked.run_together(jobs), stacked.run_alone(jobs)
    for request, result, one in zip(members, found, alone, strict=True):
        assert result.batch_size == len(jobs)
        truth = VARIANTS["softmax"].reference(**request.arguments())
        bound = request.bounds(truth)
        for name, raw in result.outputs.items():
            assert raw.dtype == one.outputs[name].dtype
            assert_within(tensor_of(raw), getattr(truth, name), bound[name])
        if request.parameters.get("dropout"):
            masks = [tensor_of(a.outputs["weights"]) == 0 for a in (result, one)]
            assert torch.equal(*masks)


@pytest.mark.parametrize("seed", range(10))
def test_stacked_jobs_over_a_layer_match_each_alone(stacked: EngineRunner, seed: int) -> None:
    jobs = layer_group(seed)
    found, alone = stacked.run_together(jobs), stacked.run_alone(jobs)
    # two orders of summation over M, D and S, all sizes of order one: half of the digits
    close = {"float64": 2.0**-26, "float32": 2.0**-12, "float16": 2.0**-5}[
        jobs[0].plan.inputs.dtype
    ]
    for result, one in zip(found, alone, strict=True):
        assert result.batch_size == len(jobs)
        assert result.outputs.keys() == one.outputs.keys()
        for name in result.outputs:
            left, right = tensor_of(result.outputs[name]), tensor_of(one.outputs[name])
            torch.testing.assert_close(left, right, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e30), (torch.float64, 1e200), (torch.bfloat16, 1e30)],
    ids=str,
)
def test_huge_numbers_of_one_job_change_no_other_jobs_bits(
    stacked: EngineRunner, dtype: torch.dtype, size: float
) -> None:
    """The code path of a job depends on its own numbers only, and so do its bits."""
    names = ("query", "key", "value")
    ordinary, huge = (
        job_of({n: (torch.randn(1, 2, 33, 8).double() * x).to(dtype) for n in names})
        for x in (1.0, size)
    )
    for outputs in (("output",), ("output", "weights")):
        plan = replace(ordinary.plan, outputs=frozenset(outputs))
        first, second = Job(plan, ordinary.tensors), Job(plan, huge.tensors)
        (alone,) = stacked.run_alone([first])
        found, _ = stacked.run_together([first, second])
        assert found.batch_size == 2
        assert bits(found) == bits(alone)


def test_overflowing_projection_of_one_job_changes_no_other_jobs_bits(
    stacked: EngineRunner,
) -> None:
    """Tests the same for numbers that a layer makes large, as float16 easily does."""
    weight = torch.randn(64, 16).half()
    names = ("query", "key", "value")
    layer = {"layout": "v1", "heads": 2, "tensors": {f"W_{n}": weight for n in names}}
    first, second = (
        job_of({"x": torch.randn(1, 9, 64).half() * size}, ("output", "weights"), layer)
        for size in (1.0, 2e4)
    )
    second = with_layer(second, first)
    (alone,) = stacked.run_alone([first])
    found, _ = stacked.run_together([first, second])
    assert found.batch_size == 2
    assert bits(found) == bits(alone)
