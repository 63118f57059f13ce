"""Every variant, forward and backward, gives the same bits alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qkv.attention.variant import Variant
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.plan import Plan
from support.batch_jobs import VARIANTS_AND_JOBS, random_jobs
from support.engines import EngineRunner, bits


@pytest.fixture(scope="module")
def runner() -> Iterator[EngineRunner]:
    bench = EngineRunner()
    yield bench
    bench.close()


@pytest.mark.parametrize(("variant", "kind"), VARIANTS_AND_JOBS)
def test_same_bits_alone_and_in_a_batch(
    runner: EngineRunner, variant: Variant, kind: type[Plan]
) -> None:
    for seed in range(20):
        jobs = random_jobs(variant, kind, seed)
        alone, found = runner.run_alone(jobs), runner.run_together(jobs)
        for one, other in zip(alone, found, strict=True):
            assert one.batch_size == 1
            assert bits(one) == bits(other), seed
        shared = not all(map(jobs[0].plan.has_batch, jobs[0].tensors))
        if not (shared and kind is GradientPlan):
            assert found[0].batch_size == len(jobs)
