"""The order of copies, computations and waits, by the log of the pretended device."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Final

from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.engine import Engine
from qkv.engine.executor import launch
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from qkv.telemetry.worker_state import SharedState
from support.engines import bits, new_job
from support.pretended_device import PretendedDevice, log
from support.processes import TIMEOUT_S
from support.raw_connection import random_inputs

WAIT: Final = "wait for outputs"
STAGES: Final = {
    "to device": "copy inputs",
    "compute waits for incoming": "compute waits for inputs",
    "aten::_fused_sdp_choice": "compute",
    "aten::_scaled_dot_product_attention_math": "compute",
    "aten::bmm": "compute",
    "outgoing waits for compute": "outputs wait for compute",
    "to host": "copy outputs",
    "sync: event": WAIT,
}
ONE_BATCH: Final = [
    "copy inputs",
    "compute waits for inputs",
    "compute",
    "outputs wait for compute",
    "copy outputs",
]


def stages() -> list[str]:
    """Returns the stages in the log; repeated ones are one stage, apart from waits."""
    names = groupby(STAGES[line] for line in log if line in STAGES)
    return [n for name, same in names for n in (same if name == WAIT else [name])]


def jobs_of(length: int, count: int) -> list[Job]:
    """Returns jobs with equal batch keys."""
    return [new_job(random_inputs(seed, (1, 2, length, 8))) for seed in range(count)]


def run_all(engine_device: PretendedDevice, groups: list[list[Job]]) -> list[Result]:
    """Queues groups of jobs at the same time; returns their results."""

    async def main() -> list[Result]:
        engine = Engine(engine_device, max_batch=8, verifier=BatchVerifier("off"))
        engine.start()
        try:
            with engine.paused(small_jobs=False):
                futures = [engine.submit(job) for jobs in groups for job in jobs]
                log.clear()
            return await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
        finally:
            await engine.stop()

    return asyncio.run(main())


def test_call_returns_before_the_outputs_are_there() -> None:
    """Inputs come and outputs leave in streams of their own; the only wait is for the outputs."""
    device = PretendedDevice()
    launched = launch(jobs_of(5, 3), device, stack=True)
    assert stages() == ONE_BATCH
    assert not [line for line in log if line.startswith("sync")]
    assert len(launched()) == 3
    assert stages() == [*ONE_BATCH, WAIT]
    into, out_of = log.index("in incoming"), log.index("out of incoming")
    assert log[into:out_of].count("to device") == 3  # one copy for each stacked input
    leaving = log[log.index("in outgoing") : log.index("out of outgoing")]
    assert leaving.count("to host") == 2  # the output, and the guards of all items
    assert device.synchronizations == 1


def test_next_batch_begins_before_the_host_waits_for_the_previous_one() -> None:
    """Its inputs travel, and the outputs of the previous batch leave, while the device computes."""
    groups = [jobs_of(length, 2) for length in (5, 6, 7)]
    results = run_all(PretendedDevice(), groups)
    assert stages() == [*ONE_BATCH, *ONE_BATCH, WAIT, *ONE_BATCH, WAIT, WAIT]
    alone = [launch([job], PretendedDevice(), True)()[0] for jobs in groups for job in jobs]
    for result, expected in zip(results, alone, strict=True):
        assert result.batch_size == 2
        assert bits(result) == bits(expected)


def test_wait_that_never_returns_is_reported_as_a_stuck_device() -> None:
    """The supervisor then replaces the process."""
    state = SharedState(1, stuck_s=1e9, stuck_device_s=0.05)
    worker = state.worker(0)

    async def main() -> tuple[list[int], list[int]]:
        device = PretendedDevice()
        device.ends_waits.clear()
        engine = Engine(device, on_busy=worker.set_busy)
        engine.start()
        try:
            future = engine.submit(jobs_of(5, 1)[0])
            await asyncio.sleep(0.2)
            stuck = state.stuck_processes
            assert not future.done()
            device.ends_waits.set()
            await asyncio.wait_for(future, TIMEOUT_S)
            await asyncio.sleep(0.1)
            return stuck, state.stuck_processes
        finally:
            device.ends_waits.set()
            await engine.stop()

    assert asyncio.run(main()) == ([0], [])
