"""POST /v1/layers: finds the attention layers of a model by the names and shapes of its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import JobRunner
from qkv.api.request_body import read_body, require_json
from qkv.api.work_threads import WorkThreads
from qkv.jobs.layers import list_layers
from qkv.settings import Settings
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 8 << 20
"""Limit of the body: 65,536 names of 100 characters, each with two sizes."""


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["layers"])
    threads, limit = WorkThreads("layers", 1), min(MAX_BODY_BYTES, settings.max_body_bytes)

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
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            body = await read_body(request, limit, json.aligned_offset, admission.grow)
            received_at, admission.is_received = time.perf_counter(), True

            def work(raise_if_stopped: Callable[[], None]) -> bytes:
                layers = list_layers(bytes(body), raise_if_stopped)
                return b'{"layers":%b,"max_body_bytes":%d}' % (layers, settings.max_body_bytes)

            content = await threads.run(request, received_at, wait_s, work)
        return Response(content, media_type=json.MEDIA_TYPE)

    return routes
