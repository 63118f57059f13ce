"""Runs a sweep and yields its events: progress, cell, done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from qkv.attention.signature import STATE
from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import summarize_times
from qkv.jobs.measure.sweep_curve import Curve
from qkv.jobs.measure.sweep_request import SweepRequest, Times, crossovers
from qkv.jobs.plan import PEAK_BYTES, Plan
from qkv.tensors import RawTensor
from qkv.wire.responses import Cell, Crossover, Done, Progress

__all__ = ["Runner", "SweepEvent", "SweepRun"]

_T = TypeVar("_T")

SweepEvent = tuple[str, Progress | Cell | Done]
"""The name of an event and its data."""


class Runner(Protocol):
    """A runner of the jobs of a sweep."""

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
    """A sweep whose cells are measured one after another.

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
        total = len(request.curves) * len(request.lengths)
        curves: list[dict[int, Times]] = [{} for _ in request.curves]
        for length in request.lengths:
            for index, curve in enumerate(request.curves):
                name = curve.choice.variant.name
                yield "progress", Progress(done=done, total=total, variant=name, length=length)
                cell = Cell(
                    index=index,
                    parameters=curve.choice.parameters,
                    variant=name,
                    length=length,
                    way=curve.way,
                )
                try:
                    times, cell = await self._measure(cell, curve)
                    curves[index][length] = times
                except QkvError as error:
                    cell = cell.model_copy(update={"problem": error.problem()})
                except MemoryError:  # from the inputs; the engine reports its own
                    problem = PayloadTooLarge("there is no memory for its inputs").problem()
                    cell = cell.model_copy(update={"problem": problem})
                done += 1
                yield "cell", cell
        yield (
            "done",
            Done(
                cells=done,
                crossovers=tuple(
                    Crossover(before=c.from_, after=c.to, length=c.length, between=c.between)
                    for c in crossovers(curves)
                ),
            ),
        )

    async def _measure(self, cell: Cell, curve: Curve) -> tuple[Times, Cell]:
        """Returns the times of a cell, and the cell with its measurements.

        Raises:
            QkvError: the variant cannot run.
        """
        plan = self._request.plan(curve, cell.length)
        held = await self._state_before(curve, cell.length) if curve.way == "state" else {}
        with self._runner.reserve(plan.bytes_in):
            job = await self._new_job(plan, cell.length, held)
            peak, _ = await self._runner.measure(Job(plan.measured("peak"), job.tensors))
            times_ms = [(await self._runner.measure(job))[1] for _ in range(self._request.repeats)]
        times = summarize_times(times_ms)
        measured = {
            **times.model_dump(),
            "flops": plan.flops,
            "bytes": plan.bytes,
            "peak_bytes": int(peak[PEAK_BYTES].numpy()[0]),
            "held_bytes": _held_bytes(curve, job),
        }
        return Times(times.least_ms, times.median_ms, times.most_ms), cell.model_copy(
            update=measured
        )

    async def _state_before(self, curve: Curve, length: int) -> Mapping[str, RawTensor]:
        """Returns the state behind the tokens before the timed one."""
        plan = self._request.plan_before(curve, length)
        with self._runner.reserve(plan.bytes):
            outputs, _ = await self._runner.measure(await self._new_job(plan, length))
        return {name: x for name, x in outputs.items() if name.startswith(STATE)}

    async def _new_job(
        self, plan: Plan, length: int, held: Mapping[str, RawTensor] | None = None
    ) -> Job:
        work = asyncio.to_thread(self._request.job, plan, length, held)
        return await _finish_despite_cancel(work)


def _held_bytes(curve: Curve, job: Job) -> int | None:
    """Returns the bytes that are kept from token to token; None for whole calls."""
    if curve.way is None:
        return None
    kept = {"cache": ("key", "value"), "state": (STATE,), "recompute": ()}[curve.way]
    return sum(x.nbytes for name, x in job.tensors.items() if name.startswith(kept))


async def _finish_despite_cancel(work: Coroutine[Any, Any, _T]) -> _T:
    """Waits for a thread even if this task is cancelled: the thread still uses the memory."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
