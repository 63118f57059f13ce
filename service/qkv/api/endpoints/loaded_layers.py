"""GET /v1/layers: lists and describes the layers of the checkpoints that the operator loaded."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path, Response

from qkv.api.models import Layout
from qkv.api.openapi.operation import problem_responses
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope
from qkv.errors import NotFound
from qkv.jobs.loaded import loaded_layers
from qkv.wire import json, layer_responses
from qkv.wire.layer_responses import LoadedCheckpoint, UnservedLayers

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


def router(layers: loaded_layers.LoadedLayers) -> APIRouter:
    """Returns the routes."""
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
