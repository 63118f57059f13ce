"""Runs a sweep and yields its events: progress, cell, done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import summarize_times
from qkv.jobs.measure.probe_plans import PEAK_BYTES, PeakMemoryPlan
from qkv.jobs.measure.sweep_request import SweepRequest, Times, crossovers
from qkv.jobs.measure.variant_choice import VariantChoice
from qkv.tensors import RawTensor
from qkv.wire.responses import Cell, Crossover, Done, Progress

__all__ = ["Runner", "SweepEvent", "SweepRun"]

_T = TypeVar("_T")

SweepEvent = tuple[str, Progress | Cell | Done]
"""The name of an event and its data."""


class Runner(Protocol):
    """Runs the jobs of a sweep."""

    def reserve(self, size: int) -> AbstractContextManager[Any]:
        """Reserves `size` bytes for inputs.

        Raises:
            QkvError: the service cannot hold that many bytes now.
        """

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """Runs a job and returns its outputs and its compute time in milliseconds.

        Raises:
            QkvError: the job failed.
        """


class SweepRun:
    """Measures the cells of a sweep, one after another.

    Args:
        request: the validated sweep request.
        runner: runs the jobs. An exception other than `QkvError` ends the sweep.
    """

    def __init__(self, request: SweepRequest, runner: Runner) -> None:
        self._request, self._runner = request, runner

    async def events(self) -> AsyncGenerator[SweepEvent, None]:
        """Yields `progress` before each cell, `cell` after it, and `done` at the end.

        A cell that cannot be measured has a `problem`; the sweep continues.
        """
        request, done = self._request, 0
        total = len(request.choices) * len(request.lengths)
        curves: list[dict[int, Times]] = [{} for _ in request.choices]
        for length in request.lengths:
            for index, choice in enumerate(request.choices):
                yield "progress", Progress(done, total, choice.variant.name, length)
                cell = Cell(index, choice.parameters, choice.variant.name, length)
                try:
                    times, cell = await self._measure(cell, choice)
                    curves[index][length] = times
                except QkvError as error:
                    cell = replace(cell, problem=error.problem())
                except MemoryError:  # from the inputs; the engine reports its own
                    problem = PayloadTooLarge("there is no memory for its inputs").problem()
                    cell = replace(cell, problem=problem)
                done += 1
                yield "cell", cell
        yield "done", Done(done, tuple(Crossover(*c) for c in crossovers(curves)))

    async def _measure(self, cell: Cell, choice: VariantChoice) -> tuple[Times, Cell]:
        """Returns the times of a cell, and the cell with its measurements.

        Raises:
            QkvError: the variant cannot run.
        """
        plan = self._request.plan(choice, cell.length)
        with self._runner.reserve(plan.bytes_in):
            job = await _finish_despite_cancel(
                asyncio.to_thread(self._request.job, plan, cell.length)
            )
            peak, _ = await self._runner.measure(Job(PeakMemoryPlan.of(plan), job.tensors))
            times_ms = [(await self._runner.measure(job))[1] for _ in range(self._request.repeats)]
        times = summarize_times(times_ms)
        return Times(times.least_ms, times.median_ms, times.most_ms), replace(
            cell,
            median_ms=times.median_ms,
            least_ms=times.least_ms,
            most_ms=times.most_ms,
            repeats=times.repeats,
            flops=plan.flops,
            bytes=plan.bytes,
            peak_bytes=int(peak[PEAK_BYTES].numpy()[0]),
        )


async def _finish_despite_cancel(work: Coroutine[Any, Any, _T]) -> _T:
    """Waits for a thread even if this task is cancelled: the thread still uses the memory."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
