"""POST /v1/sweep: times variants over lengths, as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import reduce
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Response
from pydantic import Field, Json, create_model

from qkv.api.bodies import BodyFormat, Deadline, body_route
from qkv.api.endpoints.compare import CHOICE, specific_errors
from qkv.api.event_stream import MEDIA_TYPE, Event, EventStreamResponse, error_event
from qkv.api.job_runner import JobRunner
from qkv.api.measurement_runner import HostThread, MeasurementRunner
from qkv.api.models import choice_of, closed, of_catalogue, pascal
from qkv.api.openapi.operation import problem_responses
from qkv.attention import catalogue
from qkv.errors import UnsupportedMediaType, stopping
from qkv.jobs.measure.sweep import SweepEvent
from qkv.jobs.measure.sweep import sweep as run_sweep
from qkv.jobs.measure.sweep_request import SweepFields, SweepRequest, has_length
from qkv.jobs.variant_choice import MAX_VARIANTS
from qkv.settings import Settings
from qkv.telemetry.worker_state import SharedState
from qkv.wire import json
from qkv.wire.responses import Cell, Done, Progress, Stopped

_Json: Any = Json  # an alias of another kind for type checkers
EVENTS: Final = {"progress": Progress, "cell": Cell, "done": Done, "error": Stopped}
"""The data of each event."""

_LOWEST_PRIORITY: Final = 3


class _Draining(Exception):
    """The service drains before the sweep has ended."""


def router(job_runner: JobRunner, settings: Settings, shared_state: SharedState) -> APIRouter:
    """Returns the route."""

    def check_draining() -> None:
        if shared_state.is_draining:  # before the first event, a client can send it again
            raise stopping()

    def end_if_draining() -> None:
        if shared_state.is_draining:
            raise _Draining

    # JSON too, because the events contain it, and `curl --json` accepts nothing else
    accepted = (MEDIA_TYPE, json.MEDIA_TYPE)
    body_format = BodyFormat(settings.max_body_bytes, accepted=accepted, check=check_draining)
    routes = APIRouter(tags=["attention"], route_class=body_route(job_runner, body_format))
    body_type: Any = new_body_type()
    host = HostThread()

    @routes.post(
        "/v1/sweep",
        operation_id="sweep",
        summary="Times variants over lengths.",
        description="Server-sent events: `progress` before each cell, `cell` after it, `done` at "
        "the end; `error` if the service stops earlier. Each run is queued by itself, with the "
        "lowest priority. A client ends the sweep if it disconnects.",
        status_code=200,
        response_class=EventStreamResponse,
        responses=_responses(),
        openapi_extra={
            "requestBody": {"description": f"The variants to time, {CHOICE} each, and the lengths."}
        },
    )
    async def sweep(body: body_type, wait_s: Deadline) -> Response:
        sweep_request = SweepRequest(body, job_runner.limits)
        runner = MeasurementRunner(
            job_runner, host, wait_s, priority=_LOWEST_PRIORITY, check=end_if_draining
        )
        return EventStreamResponse(_until_draining(run_sweep(sweep_request, runner)))

    return routes


async def _until_draining(events: AsyncGenerator[SweepEvent]) -> AsyncGenerator[Event]:
    """Yields the events of a sweep; an error event if the service drains first."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except _Draining:
            yield error_event(stopping())


@of_catalogue
def new_body_type() -> Any:
    """Returns the model of a body."""
    fields = SweepFields.model_fields
    choice: Any = choice_of("SweptVariantChoice", filter(has_length, catalogue.variants().values()))
    listed = Field(
        min_length=1, max_length=MAX_VARIANTS, description=fields["variants"].description
    )
    return create_model(
        "SweepRequest", __base__=SweepFields, variants=(Annotated[list[choice], listed], ...)
    )


def _event_type() -> Any:
    """Returns the type of an event, whose data is a text with JSON."""
    models = [_event_model(name, kind) for name, kind in EVENTS.items()]
    return reduce(lambda one, other: one | other, models)


def _event_model(name: str, kind: Any) -> Any:
    return closed(
        f"{pascal(name)}Event", {"event": (Literal[name], ...), "data": (_Json[kind], ...)}
    )


def _responses() -> dict[int | str, dict[str, Any]]:
    """Returns the responses by status."""
    kinds = ", ".join(
        f"`{name}`, whose data is a `{kind.__name__}`" for name, kind in EVENTS.items()
    )
    not_json = UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    )
    extra = [*specific_errors(MEDIA_TYPE, json.MEDIA_TYPE), not_json]
    good = {
        "model": _event_type(),
        "description": f"Server-sent events: {kinds}, each one line of JSON. The schema describes "
        "one event.",
    }
    return {200: good, **problem_responses(400, 413, 422, 429, 500, 503, extra=extra)}
