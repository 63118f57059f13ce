"""Engines for tests, small jobs, and the bits of their results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from qkv.client.arrays import to_raw
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.device import Device
from qkv.engine.engine import Engine
from qkv.engine.executor import execute
from qkv.jobs.job import DEFAULT_PRIORITY, Job
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.result import Result
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.known_requests import Array

T = TypeVar("T")

LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=4 << 30)
CPU: Final = CpuDevice()
_NO_LOOP: Final = asyncio.new_event_loop()  # of jobs that wait for no engine; it never runs


def new_test_device() -> Device:
    """Returns the device of `with_engine`; a test may replace this function."""
    return CPU


def with_engine(test: Callable[[Engine], Awaitable[T]], **options: Any) -> T:
    """Runs a test with a new engine, which forms batches as on a GPU."""

    async def main() -> T:
        defaults: dict[str, Any] = {"max_batch": 32, "threads": 2, "verifier": BatchVerifier("off")}
        engine = Engine(**({"device": new_test_device()} | defaults | options))
        engine.start()
        try:
            return await test(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


class EngineRunner:
    """One engine and event loop for many Hypothesis examples."""

    def __init__(self, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.engine = Engine(CPU, max_batch=32, threads=2, **options)
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.engine.start()

    def run_alone(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns the result of each job when it runs alone."""

        async def each() -> list[Result]:
            return [await self.engine.submit(job) for job in jobs]

        return self._runner.run(each())

    def run_together(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns the results of jobs that are queued at the same time."""
        return self._runner.run(run_together(self.engine, jobs))

    def close(self) -> None:
        """Stops the engine and closes the event loop."""
        self._runner.run(self.engine.stop())
        self._runner.close()


def waiting(job: Job, tenant: Tenant = ANYONE, priority: int = DEFAULT_PRIORITY) -> Job:
    """Returns a job whose wait has started, without an engine."""
    job.start_wait(asyncio.Future(loop=_NO_LOOP), tenant, priority)
    return job


async def run_together(engine: Engine, jobs: Sequence[Job]) -> list[Result]:
    """Submits jobs while the device thread is paused; returns the results."""
    with engine.paused():
        futures = [engine.submit(job) for job in jobs]
    return await asyncio.gather(*futures)


def job_of(
    tensors: Mapping[str, Any],
    outputs: Sequence[str] = ("output", "weights"),
    layer: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Job:
    """Returns a softmax job, validated as a request."""
    fields: dict[str, Any] = {"parameters": parameters, "outputs": list(outputs)}
    layer_tensors = {}
    if layer is not None:
        fields["layer"] = {k: v for k, v in layer.items() if k != "tensors"}
        layer_tensors = {name: to_raw(t) for name, t in layer["tensors"].items()}
    raw = {name: to_raw(t) for name, t in tensors.items() if t is not None}
    return Job.new(Plan, "softmax", Message(fields, raw, layer_tensors), LIMITS)


def new_job(
    arrays: Mapping[str, Array], variant: str = "softmax", kind: type[Plan] = Plan, **fields: Any
) -> Job:
    """Returns a job of numpy arrays; by default a run returns only the output."""
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    defaults = {"outputs": ["output"]} if kind is Plan else {}
    return Job.new(kind, variant, Message(defaults | fields, raw), LIMITS)


def run_alone(
    arrays: Mapping[str, Array], variant: str = "softmax", kind: type[Plan] = Plan, **fields: Any
) -> dict[str, RawTensor]:
    """Returns the outputs of a job that runs alone, without an engine."""
    (alone,) = execute([new_job(arrays, variant, kind, **fields)], CPU, False)
    return alone.outputs


def output_alone(arrays: Mapping[str, Array], variant: str = "softmax", **parameters: Any) -> bytes:
    """Returns the bytes of the output of a job that runs alone, without an engine."""
    return bytes(run_alone(arrays, variant, parameters=parameters)["output"].data)


def plain(number: int = 0, length: int = 4, batch: int = 1, **parameters: Any) -> Job:
    """Returns a small job; jobs with equal length and parameters have equal batch keys."""
    generator = torch.Generator().manual_seed(number)
    names = ("query", "key", "value")
    tensors = {n: torch.randn(batch, 2, length, 8, generator=generator) for n in names}
    return job_of(tensors, **parameters)


def bits(result: Result) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Returns dtype, shape and bytes of each output."""
    return {n: (t.dtype, t.shape, bytes(t.data)) for n, t in result.outputs.items()}
