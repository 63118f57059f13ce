"""GET /livez and GET /readyz: liveness and readiness probes."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Response

from qkv.api.openapi.operation import problem_responses
from qkv.api.request_body import record_response
from qkv.engine.job_executor import JobExecutor
from qkv.telemetry.worker_state import SharedState
from qkv.wire.responses import Failed, Passed

_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    503: {"model": Failed, "description": "The check fails."},
    **problem_responses(500),
}


def router(engine: JobExecutor, shared_state: SharedState) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/livez",
        operation_id="livez",
        summary="Liveness: no worker is stuck.",
        response_model=Passed,
        response_description="The check passes.",
        responses=_RESPONSES,
    )
    async def livez() -> Response:
        return _respond(engine.is_alive and not shared_state.stuck_processes)

    @routes.get(
        "/readyz",
        operation_id="readyz",
        summary="Readiness: every worker accepts requests, and a device runs them.",
        response_model=Passed,
        response_description="The check passes.",
        responses=_RESPONSES,
    )
    async def readyz() -> Response:
        return _respond(engine.is_ready and shared_state.is_ready)

    return routes


def _respond(is_good: bool) -> Response:
    if is_good:
        return record_response(Passed(status="ok"))
    return record_response(Failed(status="down"), 503)
