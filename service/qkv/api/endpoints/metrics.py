"""GET /metrics: the metrics of all workers, in the text format of Prometheus."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response
from prometheus_client.exposition import generate_latest

from qkv.api.openapi.operation import problem_responses
from qkv.telemetry.collector import ServiceCollector

_TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def router(collector: ServiceCollector) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/metrics",
        operation_id="metrics",
        summary="Metrics of all workers, for Prometheus.",
        response_class=Response,
        responses={
            200: {
                "description": "Metrics in the text format 0.0.4 of Prometheus.",
                "content": {_TEXT_TYPE: {"schema": {"type": "string"}}},
            },
            **problem_responses(500, 503),
        },
    )
    def metrics() -> Response:  # in a thread: it takes 8 ms
        return Response(generate_latest(collector), headers={"Content-Type": _TEXT_TYPE})

    return routes
