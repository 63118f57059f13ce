"""Runs requests in this process, without a service (`--local`): a message in, a message, JSON or
events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from qkv.attention import catalogue
from qkv.engine.device_errors import to_client_error
from qkv.engine.executor import JobOutput, execute
from qkv.jobs.convert import convert_message
from qkv.jobs.gradient_job import GradientJob
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure import compare_report
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.sweep_request import SweepRequest
from qkv.jobs.measure.sweep_run import SweepEvent, SweepRun
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = ["attend", "compare", "convert_message", "gradients", "sweep", "variants"]

_UNLIMITED: Final = Limits(response_bytes=1 << 62, job_bytes=1 << 62)


def attend(variant: str, message: Message) -> Message:
    """Runs a variant on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    return _run(Job.from_message(variant, message, _UNLIMITED), "outputs")


def gradients(variant: str, message: Message) -> Message:
    """The gradients of a variant, on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    return _run(GradientJob.from_message(variant, message, _UNLIMITED), "gradients")


def _run(job: Job, group: str) -> Message:
    ran = _execute(job)
    timing = {
        "compute_ms": ran.compute_s * 1e3,
        "device": "cpu",
        "backend": ran.backend,
        "flops": job.flops,
        "bytes": job.bytes_in + job.bytes_out,
    }
    fields = {"variant": job.variant.name, group: None, **job.annotations, "timing": timing}
    return Message(fields, ran.outputs)


def _execute(job: Job) -> JobOutput:
    return execute([job], torch.device("cpu"), stack=False)[0]


def compare(message: Message) -> dict[str, Any]:
    """Compares variants on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    steps = compare_report.compare(CompareRequest(message, _UNLIMITED))
    timing = {"compute_ms": 0.0, "runs": 0}
    try:
        job = next(steps)
        while True:
            ran = _execute(job)
            timing["compute_ms"] += ran.compute_s * 1e3
            timing["runs"] += 1
            job = steps.send((ran.outputs, ran.compute_s * 1e3))
    except StopIteration as end:
        body: dict[str, Any] = end.value
        return body | {"timing": timing | {"device": "cpu"}}


class _LocalRunner:
    """Runs the jobs of a sweep, one after the other."""

    def reserve(self, _: int) -> AbstractContextManager[None]:
        """As much as there is."""
        return nullcontext()

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """Runs it now."""
        await asyncio.sleep(0)  # who wants to end the sweep may do so before each run
        try:
            ran = _execute(job)
        except Exception as error:
            raise to_client_error(error, torch.device("cpu")) from None
        return ran.outputs, ran.compute_s * 1e3


def sweep(fields: Mapping[str, Any]) -> Generator[SweepEvent]:
    """Times variants over lengths on the CPU, and says each time as soon as it is known.

    Args:
        fields: as the service takes them.

    Raises:
        QkvError: as the service would answer.
    """
    events = SweepRun(SweepRequest(fields, _UNLIMITED), _LocalRunner()).events()
    with asyncio.Runner() as runner:
        try:
            while (said := runner.run(_next(events))) is not None:
                yield said
        finally:
            runner.run(events.aclose())


async def _next(events: AsyncGenerator[SweepEvent, None]) -> SweepEvent | None:
    return await anext(events, None)


def variants() -> list[dict[str, Any]]:
    """The catalogue."""
    return [v.describe() for v in catalogue.variants().values()]
