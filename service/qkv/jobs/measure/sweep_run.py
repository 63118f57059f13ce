"""Runs a sweep and yields its events: progress, cell, done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import summarize_times
from qkv.jobs.measure.probe_jobs import PEAK_BYTES, PeakMemoryJob
from qkv.jobs.measure.sweep_request import SweepRequest, crossovers
from qkv.jobs.measure.variant_choice import VariantChoice
from qkv.tensors import RawTensor

__all__ = ["Runner", "SweepEvent", "SweepRun"]

_T = TypeVar("_T")

SweepEvent = tuple[str, Any]
"""The name of an event and its data, plain JSON."""


class Runner(Protocol):
    """Runs the jobs of a sweep."""

    def reserve(self, size: int) -> AbstractContextManager[Any]:
        """Reserves `size` bytes for inputs.

        Raises:
            QkvError: there is no room for them.
        """

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """Runs a job and returns its outputs and its compute time in milliseconds.

        Raises:
            QkvError: the job failed.
        """


class SweepRun:
    """Measures the cells of a sweep, one after the other.

    Args:
        request: the cells.
        runner: runs the jobs. Any exception of it that is no `QkvError` ends the sweep.
    """

    def __init__(self, request: SweepRequest, runner: Runner) -> None:
        self._request, self._runner = request, runner

    async def events(self) -> AsyncGenerator[SweepEvent, None]:
        """Yields `progress` before each cell, `cell` after it, and `done` at the end.

        A cell that cannot be measured has a `problem`; the sweep goes on.
        """
        request, done = self._request, 0
        total = len(request.choices) * len(request.lengths)
        curves: list[dict[int, float]] = [{} for _ in request.choices]
        for length in request.lengths:
            for index, choice in enumerate(request.choices):
                named = {"variant": choice.variant.name, "length": length}
                yield "progress", {"done": done, "total": total, **named}
                cell: dict[str, Any] = {"index": index, "parameters": choice.parameters, **named}
                try:
                    cell |= await self._cell(choice, length)
                    curves[index][length] = cell["median_ms"]
                except QkvError as error:
                    cell["problem"] = error.problem()
                except MemoryError:  # from its inputs; the engine reports that of a run itself
                    cell["problem"] = PayloadTooLarge("there is no memory for its inputs").problem()
                done += 1
                yield "cell", cell
        found = [{"from": c.from_, "to": c.to, "length": c.length} for c in crossovers(curves)]
        yield "done", {"cells": done, "crossovers": found}

    async def _cell(self, choice: VariantChoice, length: int) -> dict[str, Any]:
        """Measures a variant at a length.

        Raises:
            QkvError: the variant cannot run.
        """
        zeros = self._request.job(choice, length)
        with self._runner.reserve(zeros.bytes_in):
            job = await _finish_despite_cancel(
                asyncio.to_thread(self._request.with_random_inputs, zeros, length)
            )
            peak, _ = await self._runner.measure(PeakMemoryJob.from_job(job))
            times_ms = [(await self._runner.measure(job))[1] for _ in range(self._request.repeats)]
        return summarize_times(times_ms) | {
            "flops": job.flops,
            "bytes": job.bytes_in + job.bytes_out,
            PEAK_BYTES: int(peak[PEAK_BYTES].numpy()[0]),
        }


async def _finish_despite_cancel(work: Coroutine[Any, Any, _T]) -> _T:
    """Waits for a thread even if this task is cancelled: the thread still uses the memory."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
