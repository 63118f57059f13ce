"""Batches on a pretended accelerator: results, faults, and what is left afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qkv.engine.device.cpu import CpuDevice
from qkv.engine.engine import Engine
from qkv.engine.executor import execute
from qkv.errors import QkvError, ServiceUnavailable
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from support.engines import new_job
from support.pretended_device import (
    PRETENDED,
    PretendedDevice,
    PretendedTensor,
    counting,
    faults,
    live_tensors,
)
from support.processes import TIMEOUT_S
from support.raw_connection import random_inputs


def test_tensor_of_the_cpu_meets_none_of_the_device() -> None:
    x = torch.ones(2, 3).to(PRETENDED)
    assert isinstance(x, PretendedTensor)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 3)
    assert (x + torch.tensor(1.0)).cpu().sum() == 12  # a number, as on a GPU
    with pytest.raises(RuntimeError, match="not supported"):
        x.numpy()


def test_reads_and_copies_are_counted() -> None:
    with counting() as counted:
        x = torch.ones(2, 3).to(PRETENDED, non_blocking=True)
        torch.empty(2, 3).copy_(x, non_blocking=True)
    assert (counted["to device"], counted["sync"], counted["to host"]) == (1, 0, 1)
    with counting() as counted:
        assert float(x.sum()) == 6
        assert x.cpu().shape == (2, 3)  # waits for the copy
        x.copy_(torch.ones(2, 3))
    assert (counted["to device"], counted["sync"], counted["to host"]) == (1, 3, 1)


def run_batch(jobs: Sequence[Job], before: Callable[[], None], device: PretendedDevice) -> Any:
    """Queues jobs as one batch; returns their results or errors, and the engine."""

    async def main() -> tuple[list[Any], Engine]:
        engine = Engine(device, max_batch=8)
        engine.start()
        try:
            with engine.paused(small_jobs=False):
                futures: list[Awaitable[Result]] = [engine.submit(job) for job in jobs]
                before()
            results = await asyncio.wait_for(
                asyncio.gather(*futures, return_exceptions=True), TIMEOUT_S
            )
            return results, engine
        finally:
            await engine.stop()

    return asyncio.run(main())


def batch() -> list[Job]:
    return [new_job(random_inputs(seed), outputs=["output", "weights"]) for seed in range(3)]


@pytest.mark.slow
def test_memory_may_run_out_at_any_allocation_of_a_batch() -> None:
    """The batch is halved and runs; nothing of it is left on the device."""
    jobs, allocations, has_failed = batch(), 0, True
    expected = [execute([job], CpuDevice(), False)[0].outputs for job in jobs]
    while has_failed:
        device = PretendedDevice()

        def limit() -> None:
            faults.allocations = allocations  # noqa: B023

        results, engine = run_batch(jobs, limit, device)
        assert not engine.failed.is_set()
        has_failed = device.released > 0
        for result, outputs in zip(results, expected, strict=True):
            assert isinstance(result, Result)
            assert result.batch_size == (3 if not has_failed else result.batch_size)
            for name, raw in result.outputs.items():
                np.testing.assert_allclose(raw.numpy(), outputs[name].numpy(), rtol=0, atol=1e-5)
        del results, result, engine
        assert live_tensors() == 0
        allocations += 1
    assert allocations > 10


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log: pytest's records hold an error, and with it the tensors of its frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_device_may_break_at_any_operation_of_a_batch() -> None:
    """Its jobs fail, the engine accepts no more, and nothing is left on the device."""
    jobs, operations, has_failed = batch(), 0, True
    while has_failed:
        device = PretendedDevice()

        def limit() -> None:
            faults.operations = operations  # noqa: B023

        results, engine = run_batch(jobs, limit, device)
        has_failed = faults.is_broken
        assert engine.failed.is_set() == has_failed
        for result in results:
            assert isinstance(result, ServiceUnavailable if has_failed else Result)
            assert not isinstance(result, QkvError) or "device has failed" in str(result)
        del results, result, engine
        assert live_tensors() == 0
        operations += 1
    assert operations > 20
