"""GET /livez and GET /readyz: liveness and readiness probes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from qkv.api.openapi.operation import describe, in_json, problem_responses
from qkv.api.openapi.schemas import closed, named
from qkv.engine.job_executor import JobExecutor
from qkv.telemetry.worker_state import SharedState

__all__ = ["router"]


def router(engine: JobExecutor, shared_state: SharedState) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/livez",
        operation_id="livez",
        summary="Liveness: no worker is stuck.",
        openapi_extra=_describe(),
    )
    async def livez(response: Response) -> dict[str, str]:
        return _status(response, engine.is_alive and not shared_state.stuck_processes)

    @routes.get(
        "/readyz",
        operation_id="readyz",
        summary="Readiness: every worker accepts requests, and a device runs them.",
        openapi_extra=_describe(),
    )
    async def readyz(response: Response) -> dict[str, str]:
        return _status(response, engine.is_ready and shared_state.is_ready)

    return routes


def _status(response: Response, good: bool) -> dict[str, str]:
    response.status_code = 200 if good else 503
    return {"status": "ok" if good else "down"}


def _describe() -> dict[str, Any]:
    """Returns the description of a probe."""

    def response(description: str, name: str, word: str) -> dict[str, Any]:
        return in_json(description, named(name, closed({"status": {"const": word}})))

    return describe(
        {
            "200": response("The check passes.", "Passed", "ok"),
            "503": response("The check fails.", "Failed", "down"),
        }
        | problem_responses(500)
    )
