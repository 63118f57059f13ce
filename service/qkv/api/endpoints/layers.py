"""POST /v1/layers: finds the attention layers of a model by the names and shapes of its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run_schemas import LAYOUT
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import TIMEOUT, describe, in_json, problem_responses
from qkv.api.openapi.schemas import (
    COUNT,
    TEXT,
    closed,
    enumeration,
    list_of,
    model_fields,
    named,
    nullable,
)
from qkv.api.request_body import read_body, require_json
from qkv.api.work_threads import WorkThreads
from qkv.attention.layers.layer_options import LayerOptions
from qkv.errors import NotAcceptable, UnsupportedMediaType
from qkv.jobs.layers import LayersFields, list_layers
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
        openapi_extra=_describe(),
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


def _describe() -> dict[str, Any]:
    """Returns the description of the operation."""
    positive = {"type": "integer", "minimum": 1}
    heads = named(
        "HeadCounts", closed({"heads": positive, "kv_heads": positive, "width": positive})
    )
    order = "Of the layout's models; null if they have no rotary embedding."
    counts = "Numbers of heads that the shapes allow, the likeliest first. `width` is of a head."
    layout = named(
        "FittingLayout",
        closed(
            {
                "layout": LAYOUT,
                "summary": TEXT,
                "width": positive | {"description": "M, of the embeddings."},
                "rotary_order": nullable(enumeration("RotaryOrder", ["half", "interleaved"]))
                | {"description": order},
                "alibi": model_fields(LayerOptions)["alibi"],
                "heads": list_of(heads, description=counts),
            }
        ),
    )
    fitting = "The layouts that names and shapes fit; several if they are ambiguous."
    layer = closed(
        {
            "prefix": TEXT | {"description": "Of the names of the layer's tensors, for `prefix`."},
            "layouts": list_of(layout, minItems=1, description=fitting),
            "shapes": {
                "type": "object",
                "additionalProperties": list_of(COUNT),
                "description": "Of the layer's tensors, by name without the prefix.",
            },
        }
    )
    limit = COUNT | {"description": "The largest body of a run that this service accepts."}
    response = closed({"layers": list_of(named("FoundLayer", layer)), "max_body_bytes": limit})
    body = in_json(
        "The names and shapes of a model's tensors.",
        named("LayersRequest", closed(model_fields(LayersFields), ["shapes"])),
    )
    good = in_json(
        "The attention layers, in the order of their tensors.", named("LayersResponse", response)
    )
    extra = [
        UnsupportedMediaType(
            f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
        ),
        NotAcceptable(f"Accept excludes every format: got 'text/html', expected {json.MEDIA_TYPE}"),
    ]
    errors = problem_responses(400, 413, 422, 429, 500, 503, 504, extra=extra)
    return describe({"200": good} | errors, body, [TIMEOUT])
