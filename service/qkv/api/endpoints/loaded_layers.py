"""GET /v1/layers: lists and describes the layers of the checkpoints that the operator loaded."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from qkv.api.endpoints.run_schemas import LAYOUT
from qkv.api.openapi.operation import describe, in_json, problem_responses
from qkv.api.openapi.schemas import (
    COUNT,
    FLOATING_DTYPE,
    TEXT,
    Schema,
    closed,
    enumeration,
    list_of,
    model_fields,
    named,
    nullable,
)
from qkv.attention.layers.layer_options import LayerOptions
from qkv.errors import NotFound
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.wire import json

__all__ = ["router"]

_UNKNOWN: Final = NotFound(
    "no layer 'minilm.encoder.layer.9': expected minilm.encoder.layer.0, ..."
)
_NAME: Final[Schema] = {
    "name": "name", "in": "path", "required": True, "schema": TEXT,
    "description": "The layer's name.", "example": "minilm.encoder.layer.3",
}  # fmt: skip


def router(layers: LoadedLayers) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(tags=["layers"])
    listing = _encode_list(layers)

    @routes.get(
        "/v1/layers",
        operation_id="list_loaded_layers",
        summary="Lists the layers that requests may name.",
        description="They are those of the checkpoints in the service's settings. A checkpoint "
        "that could not be loaded has the reason in `problem`; one that is served in part has "
        "those of the other layers in `unserved`.",
        openapi_extra=describe(
            {"200": in_json("The layers and the checkpoints.", _list_schema())}
            | problem_responses(500, 503)
        ),
    )
    async def every_layer() -> Response:
        return Response(listing, media_type=json.MEDIA_TYPE)

    @routes.get(
        "/v1/layers/{name}",
        operation_id="get_loaded_layer",
        summary="Describes one layer that requests may name.",
        openapi_extra=describe(
            {"200": in_json("The layer.", _layer_schema())}
            | problem_responses(500, 503, extra=[_UNKNOWN]),
            parameters=[_NAME],
        ),
    )
    async def one_layer(name: str) -> Response:
        return Response(json.dump(layers.describe(name)), media_type=json.MEDIA_TYPE)

    return routes


def _encode_list(layers: LoadedLayers) -> bytes:
    """Returns the response of the list; for 4,096 layers it takes more than 0.1 s to make."""
    checkpoints = [
        {
            "name": checkpoint.name,
            "layers": len(checkpoint.layers),
            "bytes": checkpoint.bytes,
            "problem": checkpoint.problem,
            "unserved": [
                {"path": path, "problem": problem} for path, problem in checkpoint.unserved.items()
            ],
        }
        for checkpoint in layers.checkpoints
    ]
    described = [layers.describe(name) for name in layers.names]
    return json.dump({"layers": described, "checkpoints": checkpoints})


def _list_schema() -> Schema:
    checkpoint = closed(
        {
            "name": TEXT,
            "layers": COUNT | {"description": "The number of its layers."},
            "bytes": COUNT | {"description": "Of the weights of its layers."},
            "problem": {
                "type": ["string", "null"],
                "description": "The reason why it is not served; null if it is.",
            },
            "unserved": list_of(closed({"path": TEXT, "problem": TEXT}))
            | {
                "description": "The reasons why some of its layers are not served, by the path of "
                "the modules around their blocks."
            },
        }
    )
    return named(
        "LoadedLayers",
        closed(
            {
                "layers": list_of(_layer_schema()),
                "checkpoints": list_of(named("LoadedCheckpoint", checkpoint)),
            }
        ),
    )


def _layer_schema() -> Schema:
    fields, size = model_fields(LayerOptions), {"type": "integer", "minimum": 1}
    inputs = enumeration("LayerInput", ["attention", "residual"])
    return named(
        "LoadedLayer",
        closed(
            {
                "name": TEXT | {"description": "The name in requests."},
                "layout": LAYOUT,
                "prefix": TEXT | {"description": "Of the names of its tensors."},
                "dtype": FLOATING_DTYPE,
                "heads": size | {"description": "The number of query heads."},
                "kv_heads": size | {"description": "The number of key heads."},
                "head_width": size | {"description": "The width D of a query head."},
                "width": size | {"description": "The width M of x."},
                "output_width": nullable(size)
                | {"description": "Of the output; null: the layer has no output projection."},
                "rope": fields["rope"],
                "qk_norm": nullable(fields["qk_norm"])
                | {"description": "Numbers of the norm of queries and keys; null: there is none."},
                "alibi": fields["alibi"],
                "parameters": {
                    "type": "object",
                    "description": "Parameters of a variant that the checkpoint has. A run has "
                    "them unless the request gives others.",
                },
                "inputs": list_of(inputs) | {"description": "The values of `layer.input`."},
                "ignored": list_of(TEXT)
                | {"description": "Fields of config.json that `ignore` in qkv.toml passes over."},
                "bytes": COUNT | {"description": "Of its weights."},
            }
        ),
    )
