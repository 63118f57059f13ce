"""POST /v1/layers: finds the attention layers of a model by the names and shapes of its tensors."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import JobRunner
from qkv.api.request_body import read_body, require_json
from qkv.jobs.layers import list_layers
from qkv.settings import Settings
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 8 << 20
"""Limit of the body: 65,536 names of 100 characters, each with two sizes."""


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["layers"])
    limit = min(MAX_BODY_BYTES, settings.max_body_bytes)

    @routes.post(
        "/v1/layers",
        operation_id="list_layers",
        summary="Finds the attention layers of a model.",
        description="The request has names and shapes only, as the header of a safetensors file "
        "has them. The response has the layouts that each layer fits, and the numbers of heads "
        "that its shapes allow.",
    )
    async def find(request: Request) -> Response:
        require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
        require_json(request)
        with job_runner.admit(request) as admission:
            body = await read_body(request, limit, json.aligned_offset, admission.grow)
            content = await asyncio.to_thread(
                lambda: json.dump(
                    {
                        "layers": list_layers(json.load(bytes(body))),
                        "max_body_bytes": settings.max_body_bytes,
                    }
                )
            )
        return Response(content, media_type=json.MEDIA_TYPE)

    return routes
