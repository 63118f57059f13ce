"""POST /v1/sweep: variants over lengths, told as they are timed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.event_stream import MEDIA_TYPE, Event, Events, failed
from qkv.api.job_runner import Runs
from qkv.api.request_body import body
from qkv.engine.admission import Place
from qkv.errors import NotNow, UnsupportedMediaType
from qkv.jobs.job import Job
from qkv.jobs.measure.sweep_request import Sweep
from qkv.jobs.measure.sweep_run import Course
from qkv.settings import Settings
from qkv.telemetry.worker_state import Fleet
from qkv.tensors import RawTensor
from qkv.wire import json, require

__all__ = ["router"]

_LAST: Final = 3  # the priority of what has time


class _Stopping(Exception):
    """The service ends before the sweep does."""


class _Turns:
    """Runs the jobs of a sweep after everybody else's.

    Args:
        runs: runs them.
        wait_s: seconds that each may wait for its turn.
        fleet: says when the service ends.
    """

    def __init__(self, runs: Runs, wait_s: float | None, fleet: Fleet) -> None:
        self._runs, self._wait_s, self._fleet = runs, wait_s, fleet

    def room(self, size: int) -> Place:
        """The inputs are made here, and have room for themselves as if they came in a body.

        Raises:
            NotNow: there is none.
            _Stopping: the service ends.
        """
        self._go_on()
        return self._runs.room(size)

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """Waits for its turn.

        Raises:
            QkvError: from the engine.
            _Stopping: the service ends.
        """
        self._go_on()
        ran = await self._runs.measure(job, self._wait_s, priority=_LAST)
        return ran.outputs, ran.timing["compute_ms"]

    def _go_on(self) -> None:
        if self._fleet.draining:
            raise _Stopping


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
        return Events(_told(Course(asked, _Turns(runs, wait_s, fleet))))

    return routes


def _check_media_type(request: Request) -> None:
    """JSON, also where nothing is said: there are no tensors."""
    said = request.headers.get("content-type", json.MEDIA_TYPE).partition(";")[0].strip().lower()
    if said != json.MEDIA_TYPE:
        raise UnsupportedMediaType(
            f"Content-Type {said!r:.100} is not read here; send {json.MEDIA_TYPE}"
        )


async def _told(course: Course) -> AsyncGenerator[Event, None]:
    """All that is to be said."""
    async with aclosing(course.events()) as events:
        try:
            async for event in events:
                yield event
        except _Stopping:
            yield failed(NotNow("the service is stopping", retry_after=5))
