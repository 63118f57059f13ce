"""Checks of a stacked batch's bits against a request that runs alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qkv.engine.batch_verifier import BatchVerifier, VerifyMode
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from qkv.tensors import RawTensor
from support.engines import bits, new_job, run_together
from support.pretended_device import PretendedDevice
from support.raw_connection import random_inputs


def jobs_of(count: int, seed: int = 0, length: int = 5) -> list[Job]:
    """Returns jobs with equal batch keys."""
    return [new_job(random_inputs(seed + i, (1, 2, length, 8))) for i in range(count)]


def with_last_bit_changed(output: Result) -> Result:
    """Returns an output as a kernel for another size of the batch might compute it."""
    changed = {}
    for name, raw in output.outputs.items():
        array = np.array(raw.numpy())
        array.flat[0] = np.nextafter(array.flat[0], np.float32(np.inf))
        changed[name] = RawTensor.from_numpy(array)
    return replace(output, outputs=changed)


class Runs:
    """Begins batches; those of `different` jobs get other bits than each job alone."""

    def __init__(self, different: int = 0) -> None:
        self.different, self.sizes = different, list[int]()

    def __call__(self, jobs: Sequence[Job], *how: Any) -> Launched:
        self.sizes.append(len(jobs))
        launched = launch(jobs, *how)
        if len(jobs) != self.different:
            return launched
        return lambda: [with_last_bit_changed(output) for output in launched()]


def run(runs: Runs, mode: VerifyMode, *batches: Sequence[Job]) -> tuple[list[Any], list[bool]]:
    """Runs batches one after the other; returns their results and those of the checks."""
    checks: list[bool] = []

    async def main() -> list[list[Result]]:
        verifier = BatchVerifier(mode, checks.append)
        engine = Engine(PretendedDevice(), launch=runs, verifier=verifier)
        engine.start()
        try:
            return [await run_together(engine, jobs) for jobs in batches]
        finally:
            await engine.stop()

    return asyncio.run(main()), checks


def test_first_batch_of_each_kind_and_size_is_checked() -> None:
    runs = Runs()
    _, checks = run(
        runs, "sample", jobs_of(3), jobs_of(3, 9), jobs_of(2), jobs_of(3, length=6), jobs_of(1)
    )
    assert runs.sizes == [3, 1, 1, 1, 3, 2, 1, 1, 3, 1, 1, 1, 1]
    assert checks == [True, True, True]


def test_every_batch_is_checked_or_none() -> None:
    for mode, sizes in (("always", [3, 1, 1, 1] * 2), ("off", [3, 3])):
        runs = Runs()
        run(runs, mode, jobs_of(3), jobs_of(3, 9))  # type: ignore[arg-type]
        assert runs.sizes == sizes


def test_kind_with_other_bits_is_not_stacked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests get the bits that they have alone; other sizes are stacked."""
    runs, three = Runs(different=3), jobs_of(3)
    with caplog.at_level(logging.WARNING, "qkv.engine"):
        results, checks = run(runs, "sample", three, three, jobs_of(2))
    assert checks == [False, True]
    # a batch, its check, each job alone; each job alone; a batch and its check
    assert runs.sizes == [3, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1]
    alone = [launch([job], PretendedDevice(), True)()[0] for job in three]
    for batch in results[:2]:
        for result, expected in zip(batch, alone, strict=True):
            assert bits(result) == bits(expected)
            assert result.batch_size == 3
    assert len(caplog.records) == 1
    assert "softmax has other bits in a batch of 3 requests" in caplog.text


def test_later_batches_are_checked_now_and_then() -> None:
    jobs, checks = jobs_of(2), list[bool]()
    outputs = launch(jobs, PretendedDevice(), True)()
    verifier, alone = BatchVerifier("sample", checks.append), list[Job]()

    def run_alone(job: Job) -> Result:
        alone.append(job)
        return outputs[jobs.index(job)]

    for _ in range(2049):
        assert verifier.has_same_bits(jobs, outputs, run_alone)
    assert len(checks) == 3
    assert len(alone) == 6
