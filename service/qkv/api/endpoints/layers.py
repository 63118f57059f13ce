"""POST /v1/layers: finds the attention layers of a model by the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.bodies import BodyFormat, Deadline, Received, body_route
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import problem_responses
from qkv.api.work_threads import WorkThreads
from qkv.errors import NotAcceptable, UnsupportedMediaType
from qkv.jobs.layers import LayersRequest, list_layers, read_document, shapes_error
from qkv.settings import Settings
from qkv.wire import json
from qkv.wire.layer_responses import LayersResponse

MAX_BODY_BYTES: Final = 8 << 20
"""Limit of the body: 65,536 names of 100 characters, each with two sizes."""
_NOT_JSON: Final = (
    UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    ),
    NotAcceptable(f"Accept excludes every format: got 'text/html', expected {json.MEDIA_TYPE}"),
)


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    body_format = BodyFormat(
        min(MAX_BODY_BYTES, settings.max_body_bytes),
        accepted=(json.MEDIA_TYPE,),
        decode=read_document,
        to_error=shapes_error,
    )
    routes = APIRouter(tags=["layers"], route_class=body_route(job_runner, body_format))
    threads = WorkThreads("layers", 1)

    @routes.post(
        "/v1/layers",
        operation_id="list_layers",
        summary="Finds the attention layers of a model.",
        description="The request has names and shapes only, as the header of a safetensors file "
        "has them. The response has the layouts that each layer fits, and the numbers of heads "
        "that its shapes allow.",
        response_model=LayersResponse,
        response_description="The attention layers, in the order of their tensors.",
        responses=problem_responses(400, 413, 422, 429, 500, 503, 504, extra=_NOT_JSON),
        openapi_extra={
            "requestBody": {"description": "The names and shapes of a model's tensors."}
        },
    )
    async def find(
        request: Request, body: LayersRequest, received: Received, wait_s: Deadline
    ) -> Response:
        def work(raise_if_stopped: Callable[[], None]) -> bytes:
            layers = list_layers(body, raise_if_stopped)
            return b'{"layers":%b,"max_body_bytes":%d}' % (layers, settings.max_body_bytes)

        content = await threads.run(request, received.received_at, wait_s, work)
        return Response(content, media_type=json.MEDIA_TYPE)

    return routes
