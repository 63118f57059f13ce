"""Tensors without a batch axis: requests share a batch only with the same objects of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import LIMITS, EngineRunner, bits
from support.variant_calls import VARIANTS, head_terms, random_inputs

SHARED: Final = {
    name: {i.name for i in variant.inputs.values() if "B" not in i.letters}
    for name, variant in VARIANTS.items()
}
"""The names of these tensors by variant."""

every_variant = pytest.mark.parametrize("name", [name for name, shared in SHARED.items() if shared])


@pytest.fixture(scope="module")
def runner() -> Iterator[EngineRunner]:
    bench = EngineRunner()
    yield bench
    bench.close()


def raw_inputs(name: str) -> dict[str, RawTensor]:
    """Returns new random tensors of a request."""
    tensors: dict[str, Tensor] = random_inputs(name) | head_terms(name)
    names = {i.argument: i.name for i in VARIANTS[name].inputs.values()}
    return {names[argument]: to_raw(tensor) for argument, tensor in tensors.items()}


def job_of(name: str, raw: dict[str, RawTensor]) -> Job:
    return Job.new(Plan, name, Message({}, raw), LIMITS)


def shared_of(name: str, raw: dict[str, RawTensor]) -> dict[str, RawTensor]:
    return {n: raw[n] for n in SHARED[name]}


@every_variant
def test_same_objects_share_a_batch(name: str, runner: EngineRunner) -> None:
    first = raw_inputs(name)
    jobs = [job_of(name, raw_inputs(name) | shared_of(name, first)) for _ in range(3)]
    assert len({job.batch_key for job in jobs}) == 1
    alone = runner.run_alone(jobs)
    for one, result in zip(alone, runner.run_together(jobs), strict=True):
        assert result.batch_size == 3
        assert bits(result) == bits(one)


@every_variant
def test_other_objects_are_never_mixed(name: str, runner: EngineRunner) -> None:
    """Also of equal numbers: to compare them would take longer than a call."""
    first = raw_inputs(name)
    jobs = [job_of(name, first)]
    for n in SHARED[name]:
        copied = RawTensor.from_numpy(first[n].numpy().copy())
        jobs += [job_of(name, first | {n: other}) for other in (copied, raw_inputs(name)[n])]
    assert len({job.batch_key for job in jobs}) == len(jobs)
    alone = runner.run_alone(jobs)
    for one, result in zip(alone, runner.run_together(jobs), strict=True):
        assert result.batch_size == 1
        assert bits(result) == bits(one)
