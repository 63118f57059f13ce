"""/v1/layers: lists the layers that requests may name, and finds those of a model.

`GET` lists and describes the layers of the checkpoints that the operator loaded. `POST` finds the
attention layers of a model by the names and shapes of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response

from qkv.api.bodies import BodyFormat, Deadline, Received, body_route
from qkv.api.job_runner import JobRunner
from qkv.api.models import Layout
from qkv.api.openapi.operation import problem_responses
from qkv.api.work_threads import WorkThreads
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope
from qkv.errors import NotAcceptable, NotFound, UnsupportedMediaType
from qkv.jobs.layers import LayersRequest, list_layers, read_document, shapes_error
from qkv.jobs.loaded import loaded_layers
from qkv.settings import Settings
from qkv.wire import json, layer_responses
from qkv.wire.layer_responses import LayersResponse, LoadedCheckpoint, UnservedLayers

MAX_BODY_BYTES: Final = 8 << 20
"""Limit of the body: 65,536 names of 100 characters, each with two sizes."""
_NOT_JSON: Final = (
    UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    ),
    NotAcceptable(f"Accept excludes every format: got 'text/html', expected {json.MEDIA_TYPE}"),
)
_UNKNOWN: Final = NotFound(
    "no layer 'minilm.encoder.layer.9': expected minilm.encoder.layer.0, ..."
)
_Name = Annotated[
    str,
    Path(
        description="The layer's name.",
        openapi_examples={"minilm": {"value": "minilm.encoder.layer.3"}},
    ),
]


class LoadedLayer(layer_responses.LoadedLayer):
    """A layer that requests may name."""

    layout: Layout
    # the client needs no torch, which the modules of these two import
    rope: Rope | None  # type: ignore[assignment]
    qk_norm: QKNorm | None  # type: ignore[assignment]


class LoadedLayers(layer_responses.LoadedLayers):
    """The layers that requests may name, and the checkpoints that they are of."""

    layers: list[LoadedLayer]


def listing_router(layers: loaded_layers.LoadedLayers) -> APIRouter:
    """Returns the routes that list the loaded layers."""
    routes = APIRouter(tags=["layers"])
    # for 4,096 layers it takes more than 0.1 s to make
    listing = _list(layers).to_json()

    @routes.get(
        "/v1/layers",
        operation_id="list_loaded_layers",
        summary="Lists the layers that requests may name.",
        description="They are those of the checkpoints in the service's settings. A checkpoint "
        "that could not be loaded has the reason in `problem`; one that is served in part has "
        "those of the other layers in `unserved`.",
        response_model=LoadedLayers,
        response_description="The layers and the checkpoints.",
        responses=problem_responses(500, 503),
    )
    async def every_layer() -> Response:
        return Response(listing, media_type=json.MEDIA_TYPE)

    @routes.get(
        "/v1/layers/{name}",
        operation_id="get_loaded_layer",
        summary="Describes one layer that requests may name.",
        response_description="The layer.",
        responses=problem_responses(500, 503, extra=[_UNKNOWN]),
    )
    async def one_layer(name: _Name) -> LoadedLayer:
        return LoadedLayer(**layers.describe(name))

    return routes


def _list(layers: loaded_layers.LoadedLayers) -> LoadedLayers:
    checkpoints = [
        LoadedCheckpoint(
            name=checkpoint.name,
            layers=len(checkpoint.layers),
            bytes=checkpoint.bytes,
            problem=checkpoint.problem,
            unserved=[
                UnservedLayers(path=path, problem=problem)
                for path, problem in checkpoint.unserved.items()
            ],
        )
        for checkpoint in layers.checkpoints
    ]
    described = [LoadedLayer(**layers.describe(name)) for name in layers.names]
    return LoadedLayers(layers=described, checkpoints=checkpoints)


def finding_router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route that finds the layers of a model."""
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
