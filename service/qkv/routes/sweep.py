"""POST /v1/sweep: variants over lengths, told as they are timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.choice import Choice
from qkv.errors import NotNow, QkvError, UnsupportedMediaType
from qkv.findings import times
from qkv.fleet import Fleet
from qkv.measured import PEAK, PeakJob
from qkv.routes.body import body
from qkv.routes.events import MEDIA_TYPE, Event, Events, failed
from qkv.routes.runs import Runs
from qkv.settings import Settings
from qkv.sweep import Sweep, crossovers
from qkv.wire import json, require

__all__ = ["router"]

_LAST: Final = 3  # the priority of what has time


class _Stopping(Exception):
    """The service ends before the sweep does."""


def router(runs: Runs, settings: Settings, fleet: Fleet) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["attention"])

    @routes.post(
        "/v1/sweep",
        operation_id="sweep",
        summary="Times variants over lengths, and says each time as soon as it is known.",
        description="Server-sent events: `progress` before each cell, `cell` after it, `done` at "
        "the end; `error` where the service stops before that. Every run has the last priority, "
        "and waits for its turn by itself. Who leaves, ends it.",
    )
    async def sweep(request: Request) -> Response:
        # what the events hold is JSON, and `curl --json` takes nothing else
        require(", ".join(request.headers.getlist("accept")), MEDIA_TYPE, json.MEDIA_TYPE)
        _check_media_type(request)
        wait_s = runs.patience_of(request)
        with runs.enter(request) as place:
            came = await body(request, settings.max_body_bytes, json.aligned_at, place.grow)
            asked = Sweep(json.plain(bytes(came)), runs.limits)
        return Events(_Sweeping(runs, asked, wait_s, fleet).events())

    return routes


def _check_media_type(request: Request) -> None:
    """JSON, also where nothing is said: there are no tensors."""
    said = request.headers.get("content-type", json.MEDIA_TYPE).partition(";")[0].strip().lower()
    if said != json.MEDIA_TYPE:
        raise UnsupportedMediaType(
            f"Content-Type {said!r:.100} is not read here; send {json.MEDIA_TYPE}"
        )


class _Sweeping:
    """Has the cells of a sweep run, one after the other."""

    def __init__(self, runs: Runs, asked: Sweep, wait_s: float | None, fleet: Fleet) -> None:
        self._runs, self._asked, self._wait_s, self._fleet = runs, asked, wait_s, fleet

    async def events(self) -> AsyncGenerator[Event, None]:
        """All that is to be said."""
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
                except _Stopping:
                    yield failed(NotNow("the service is stopping", retry_after=5))
                    return
                except QkvError as error:
                    cell["problem"] = error.problem()
                done += 1
                yield "cell", cell
        crossed = [{"from": c.from_, "to": c.to, "length": c.length} for c in crossovers(curves)]
        yield "done", {"cells": done, "crossovers": crossed}

    async def _cell(self, choice: Choice, length: int) -> dict[str, Any]:
        """What is found of a variant at a length.

        Raises:
            QkvError: it cannot run.
            _Stopping: the service ends.
        """
        self._go_on()
        blank = self._asked.job(choice, length)
        # the inputs are made here, and have room for themselves as if they came in a body
        with self._runs.room(blank.bytes_in):
            job = await asyncio.to_thread(self._asked.drawn, blank, length)
            peak = await self._runs.measure(PeakJob.like(job), self._wait_s, priority=_LAST)
            times_ms = []
            for _ in range(self._asked.repeats):
                self._go_on()
                ran = await self._runs.measure(job, self._wait_s, priority=_LAST)
                times_ms.append(ran.timing["compute_ms"])
        return times(times_ms) | {
            "flops": job.flops,
            "bytes": job.bytes_in + job.bytes_out,
            PEAK: int(peak.outputs[PEAK].numpy()[0]),
        }

    def _go_on(self) -> None:
        if self._fleet.draining:
            raise _Stopping
