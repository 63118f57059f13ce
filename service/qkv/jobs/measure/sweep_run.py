"""What a sweep says while it is measured: which cell comes next, what was found, where curves
cross."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from qkv.errors import QkvError, TooLarge
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import times
from qkv.jobs.measure.probe_jobs import PEAK, PeakJob
from qkv.jobs.measure.sweep_request import Sweep, crossovers
from qkv.jobs.measure.variant_choice import Choice
from qkv.tensors import RawTensor

__all__ = ["Course", "Runner", "Said"]

_T = TypeVar("_T")

Said = tuple[str, Any]
"""An event's name, and what it says, as plain JSON."""


class Runner(Protocol):
    """What has the jobs of a sweep run."""

    def room(self, size: int) -> AbstractContextManager[Any]:
        """Room for so many bytes of inputs.

        Raises:
            QkvError: there is none.
        """

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """What came of a job, and the milliseconds that its computation took.

        Raises:
            QkvError: it failed.
        """


class Course:
    """Has the cells of a sweep measured, one after the other.

    Args:
        asked: which.
        runner: what runs them. What it raises that is no `QkvError` ends the course.
    """

    def __init__(self, asked: Sweep, runner: Runner) -> None:
        self._asked, self._runner = asked, runner

    async def events(self) -> AsyncGenerator[Said, None]:
        """`progress` before each cell, `cell` after it, `done` at the end. A cell that cannot be
        measured says its `problem`, and the others go on."""
        asked, done = self._asked, 0
        total = len(asked.choices) * len(asked.lengths)
        curves: list[dict[int, float]] = [{} for _ in asked.choices]
        for length in asked.lengths:
            for index, choice in enumerate(asked.choices):
                named = {"variant": choice.variant.name, "length": length}
                yield "progress", {"done": done, "total": total, **named}
                cell: dict[str, Any] = {"index": index, "parameters": choice.parameters, **named}
                try:
                    cell |= await self._cell(choice, length)
                    curves[index][length] = cell["median_ms"]
                except QkvError as error:
                    cell["problem"] = error.problem()
                except MemoryError:  # its runs say so themselves
                    cell["problem"] = TooLarge("there is no memory for its inputs").problem()
                done += 1
                yield "cell", cell
        crossed = [{"from": c.from_, "to": c.to, "length": c.length} for c in crossovers(curves)]
        yield "done", {"cells": done, "crossovers": crossed}

    async def _cell(self, choice: Choice, length: int) -> dict[str, Any]:
        """What is found of a variant at a length.

        Raises:
            QkvError: it cannot run.
        """
        blank = self._asked.job(choice, length)
        with self._runner.room(blank.bytes_in):
            job = await _to_its_end(asyncio.to_thread(self._asked.drawn, blank, length))
            peak, _ = await self._runner.measure(PeakJob.like(job))
            times_ms = [(await self._runner.measure(job))[1] for _ in range(self._asked.repeats)]
        return times(times_ms) | {
            "flops": job.flops,
            "bytes": job.bytes_in + job.bytes_out,
            PEAK: int(peak[PEAK].numpy()[0]),
        }


async def _to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Waits for a thread, also where nobody wants what it makes any more: it holds it still."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
