"""POST /v1/sweep: times variants over lengths, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.compare import CHOICE, choice_of, specific_errors
from qkv.api.event_stream import MEDIA_TYPE, Event, EventStreamResponse, error_event
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import TIMEOUT, describe, in_json, problem_responses
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import (
    COMPONENT,
    PROBLEM,
    TEXT,
    closed,
    either,
    list_of,
    model_fields,
    named,
    pascal,
)
from qkv.api.request_body import read_body, require_json
from qkv.attention import catalogue
from qkv.engine.admission import AdmittedBody
from qkv.errors import UnsupportedMediaType, stopping
from qkv.jobs.job import Job
from qkv.jobs.measure.sweep_request import SweepFields, SweepRequest, has_length
from qkv.jobs.measure.sweep_run import SweepRun
from qkv.settings import Settings
from qkv.telemetry.worker_state import SharedState
from qkv.tensors import RawTensor
from qkv.wire import json, require_acceptable
from qkv.wire.responses import Cell, Done, Progress, Stopped

__all__ = ["EVENTS", "router"]

EVENTS: Final = {"progress": Progress, "cell": Cell, "done": Done, "error": Stopped}
"""The data of each event."""

_LOWEST_PRIORITY: Final = 3


class _Draining(Exception):
    """The service drains before the sweep has ended."""


class LowPriorityRunner:
    """A runner that gives the jobs of a sweep the lowest priority.

    Args:
        job_runner: runs the jobs.
        wait_s: seconds that each job may be queued; None: no limit.
        shared_state: has the drain flag.
    """

    def __init__(
        self, job_runner: JobRunner, wait_s: float | None, shared_state: SharedState
    ) -> None:
        self._job_runner, self._wait_s, self._shared_state = job_runner, wait_s, shared_state

    def reserve(self, size: int) -> AdmittedBody:
        """Admits inputs that this process generates, like a body of that size.

        Raises:
            ServiceUnavailable: the limits are reached.
            _Draining: the service drains.
        """
        self._check_draining()
        return self._job_runner.admit_bytes(size)

    async def measure(self, job: Job) -> tuple[Mapping[str, RawTensor], float]:
        """Runs a job; returns its outputs and its compute time in milliseconds.

        Raises:
            QkvError: from the engine.
            _Draining: the service drains.
        """
        self._check_draining()
        job_result = await self._job_runner.run_part(job, self._wait_s, priority=_LOWEST_PRIORITY)
        return job_result.outputs, job_result.times.compute_s * 1e3

    def _check_draining(self) -> None:
        if self._shared_state.is_draining:
            raise _Draining


def router(job_runner: JobRunner, settings: Settings, shared_state: SharedState) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["attention"])

    @routes.post(
        "/v1/sweep",
        operation_id="sweep",
        summary="Times variants over lengths.",
        description="Server-sent events: `progress` before each cell, `cell` after it, `done` at "
        "the end; `error` if the service stops earlier. Each run is queued by itself, with the "
        "lowest priority. A client ends the sweep if it disconnects.",
        openapi_extra=_describe(),
    )
    async def sweep(request: Request) -> Response:
        # JSON too, because the events contain it, and `curl --json` accepts nothing else
        require_acceptable(
            ", ".join(request.headers.getlist("accept")), MEDIA_TYPE, json.MEDIA_TYPE
        )
        require_json(request)
        if shared_state.is_draining:  # before the first event, a client can send it again
            raise stopping()
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            body = await read_body(
                request, settings.max_body_bytes, json.aligned_offset, admission.grow
            )
            sweep_request = SweepRequest(json.decode_fields(bytes(body)), job_runner.limits)
        return EventStreamResponse(
            _events(SweepRun(sweep_request, LowPriorityRunner(job_runner, wait_s, shared_state)))
        )

    return routes


async def _events(sweep_run: SweepRun) -> AsyncGenerator[Event, None]:
    """Yields the events of a sweep; an error event if the service drains first."""
    async with aclosing(sweep_run.events()) as events:
        try:
            async for event in events:
                yield event
        except _Draining:
            yield error_event(stopping())


def _describe() -> dict[str, Any]:
    """Returns the description of the operation."""
    fields = model_fields(SweepFields)
    swept = [v for v in catalogue.variants().values() if has_length(v)]
    fields["variants"]["items"] = choice_of("SweptVariantChoice", swept)
    fields["lengths"] = list_of(
        fields["lengths"].pop("items"), **fields["lengths"], uniqueItems=True
    )
    request = named("SweepRequest", closed(fields, ["variants", "lengths"]))
    body = in_json(f"The variants to time, {CHOICE} each, and the lengths.", request)
    kinds = ", ".join(
        f"`{name}`, whose data is a `{kind.__name__}`" for name, kind in EVENTS.items()
    )
    events = [
        named(f"{pascal(name)}Event", closed({"event": {"const": name}, "data": _data(kind)}))
        for name, kind in EVENTS.items()
    ]
    good = {
        "description": f"Server-sent events: {kinds}, each one line of JSON. The schema describes "
        "one event.",
        "content": {MEDIA_TYPE: {"schema": either(*events)}},
    }
    not_json = UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    )
    extra = [*specific_errors(MEDIA_TYPE, json.MEDIA_TYPE), not_json]
    errors = problem_responses(400, 413, 422, 429, 500, 503, extra=extra)
    return describe({"200": good} | errors, body, [TIMEOUT])


def _data(kind: type) -> dict[str, Any]:
    """Returns the schema of the data of an event: a text with JSON."""
    content = response_schema(kind)
    _, schema = content[COMPONENT]
    if "problem" in schema["properties"]:
        schema["properties"]["problem"] |= PROBLEM
    return TEXT | {"contentMediaType": json.MEDIA_TYPE, "contentSchema": content}
