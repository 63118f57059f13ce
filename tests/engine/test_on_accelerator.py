"""Batches on an accelerator: the pretended one, and that of the machine if it has one.

The tests marked `gpu` are the same tests on the accelerator that torch finds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest
from gpu_engine import too_large

from qkv.attention.variant import Variant
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.selection import find_device, new_device
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, execute, launch
from qkv.errors import PayloadTooLarge
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from support.batch_jobs import VARIANTS_AND_JOBS, random_jobs
from support.engines import bits, new_job, run_together
from support.hidden_waits import count_hidden_waits
from support.known_requests import EPS
from support.pretended_device import PretendedDevice, faults, live_tensors
from support.processes import TIMEOUT_S
from support.raw_connection import random_inputs

SEEDS: Final = range(8, 18)
FEW: Final = SEEDS[:3]
"""For the pretended device, on which each operation takes longer."""


@pytest.fixture(params=["pretended", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """Returns each accelerator; the pretended one must hold no tensors afterwards."""
    if request.param == "pretended":
        yield PretendedDevice()
        assert live_tensors() == 0
        return
    found = new_device(find_device("auto"))
    if not isinstance(found, Accelerator):
        pytest.skip("needs an accelerator")
    yield found


def batch_of(variant: Variant, kind: type[Plan], seed: int) -> list[Job]:
    """Returns random jobs with equal batch keys."""
    jobs = random_jobs(variant, kind, seed)
    return [job for job in jobs if job.batch_key == jobs[0].batch_key]


def seeds(device: Accelerator) -> range:
    return FEW if isinstance(device, PretendedDevice) else SEEDS


def softmax_jobs(length: int, count: int) -> list[Job]:
    """Returns jobs with equal batch keys."""
    return [new_job(random_inputs(seed, (1, 2, length, 8))) for seed in range(count)]


def bits_of(outputs: Sequence[Result]) -> list[Any]:
    """Returns dtype, shape and bytes of each output of each job."""
    return [bits(output) for output in outputs]


def assert_close(got: Sequence[Result], expected: Sequence[Result]) -> None:
    """Asserts equal names, dtypes and shapes, and numbers up to roundings of the largest.

    The same number of jobs must have shared the call.
    """
    for one, other in zip(got, expected, strict=True):
        assert one.outputs.keys() == other.outputs.keys()
        assert one.times.stacked_count == other.times.stacked_count
        for name, raw in one.outputs.items():
            assert (raw.dtype, raw.shape) == (other.outputs[name].dtype, other.outputs[name].shape)
            a, b = (np.asarray(r.numpy(), np.float64) for r in (raw, other.outputs[name]))
            if raw.dtype not in EPS or not a.size:
                assert np.array_equal(a, b), name
                continue
            largest = np.abs(b[np.isfinite(b)]).max(initial=1.0)
            bound = 256 * EPS[raw.dtype] * largest
            np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(("variant", "kind"), VARIANTS_AND_JOBS)
def test_stacked_batch_equals_that_on_the_cpu(
    device: Accelerator, variant: Variant, kind: type[Plan]
) -> None:
    for seed in seeds(device):
        jobs = batch_of(variant, kind, seed)
        assert_close(execute(jobs, device, stack=True), execute(jobs, CpuDevice(), stack=True))


@pytest.mark.parametrize(("variant", "kind"), VARIANTS_AND_JOBS)
def test_results_have_the_bits_of_each_job_alone(
    device: Accelerator, variant: Variant, kind: type[Plan]
) -> None:
    """If a check finds other bits in a batch, each of its jobs runs alone.

    Kernels of a CPU have other bits for some jobs of a batch. So on the pretended device a check,
    which compares one job of the batch, may miss them.
    """
    checks: list[bool] = []

    async def run(jobs: Sequence[Job]) -> tuple[list[Result], list[Result]]:
        engine = Engine(device, max_batch=8, verifier=BatchVerifier("always", checks.append))
        engine.start()
        try:
            together = await asyncio.wait_for(run_together(engine, jobs), TIMEOUT_S)
            return together, [await engine.submit(job) for job in jobs]
        finally:
            await engine.stop()

    for seed in seeds(device):
        jobs = batch_of(variant, kind, seed)
        results, alone = ([bits(r) for r in each] for each in asyncio.run(run(jobs)))
        if not isinstance(device, PretendedDevice) or not all(checks[-1:]):
            assert results == alone
        assert any(result in alone for result in results)


def test_host_waits_once_for_a_batch(device: Accelerator) -> None:
    jobs = softmax_jobs(33, 5)
    execute(jobs, device, stack=True)  # torch sets up its libraries
    before = device.synchronizations
    outputs, hidden_waits = count_hidden_waits(
        device.torch_device, lambda: execute(jobs, device, stack=True)
    )
    assert device.synchronizations - before == 1
    assert hidden_waits in (0, None)
    assert [output.times.stacked_count for output in outputs] == [5] * 5


def test_batches_that_overlap_have_the_bits_of_each_alone(device: Accelerator) -> None:
    """Memory of one batch is used again by a later one, while others are on their way."""
    batches = [softmax_jobs(16 + 5 * (i % 7), 4) for i in range(40)]
    expected = [execute(jobs, device, stack=True) for jobs in batches]
    begun, outputs = deque[Launched](), list[list[Result]]()
    for jobs in batches:
        begun.append(launch(jobs, device, stack=True))
        if len(begun) > 3:
            outputs.append(begun.popleft()())
    outputs += [finish() for finish in begun]
    assert [bits_of(o) for o in outputs] == [bits_of(o) for o in expected]


def test_engine_goes_on_after_a_job_larger_than_the_memory(device: Accelerator) -> None:
    good = softmax_jobs(33, 3)

    async def main() -> list[Any]:
        engine = Engine(device, limit=Load(1 << 10, 1 << 62, 1 << 62))
        engine.start()
        try:
            if isinstance(device, PretendedDevice):
                faults.allocations = 0  # its memory is the CPU's
            jobs = [too_large(device.free_memory()[1]), *good]
            return await asyncio.wait_for(
                asyncio.gather(*map(engine.submit, jobs), return_exceptions=True), TIMEOUT_S
            )
        finally:
            await engine.stop()

    failed, *results = asyncio.run(main())
    assert isinstance(failed, PayloadTooLarge), failed
    alone = [execute([job], device, stack=True)[0] for job in good]
    assert [bits(result) for result in results] == bits_of(alone)
