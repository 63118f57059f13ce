"""The model repository below `/v2`: lists, loads and unloads models.

Source: Triton's extension model_repository (github.com/triton-inference-server/server,
docs/protocol).
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.open_inference_catalogue import VERSION, ModelCatalogue
from qkv.api.endpoints.open_inference_models import new_router, respond
from qkv.api.openapi.open_inference_operation import describe_model, describe_server
from qkv.api.openapi.operation import in_json
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import FLAG, Schema, closed, list_of, named, nullable
from qkv.api.request_body import read_body
from qkv.errors import InvalidContent
from qkv.wire import json
from qkv.wire.open_inference_responses import Loaded, RepositoryModel, Unloaded

__all__ = ["router"]

_MAX_BODY_BYTES: Final = 1 << 16


def router(models: ModelCatalogue) -> APIRouter:
    """Returns the routes of the repository."""
    routes = new_router()

    @routes.post(
        "/v2/repository/index",
        summary="Lists every model, loaded or not.",
        openapi_extra=describe_server(
            list_of(response_schema(RepositoryModel)),
            400,
            body=in_json("A filter.", named("IndexRequest", closed({"ready": FLAG}, ()))),
        ),
    )
    async def index(request: Request) -> Response:
        fields = await _read_fields(request, "ready")
        if not isinstance(fields.get("ready", False), bool):
            raise InvalidContent("ready must be true or false")
        loaded = {name: models.is_loaded(name) for name in models.names}
        return respond(
            [
                RepositoryModel(
                    name,
                    VERSION,
                    "READY" if loaded[name] else "UNAVAILABLE",
                    "" if loaded[name] else "unloaded",
                )
                for name in models.names
                if loaded[name] or not fields.get("ready")
            ]
        )

    @routes.post(
        "/v2/repository/models/{model}/load",
        operation_id="v2_load",
        summary="Loads a model.",
        openapi_extra=_describe(response_schema(Loaded), "LoadRequest", {}),
    )
    async def load(request: Request, model: str) -> Response:
        models.find(model)
        await _reject_parameters(request)
        models.load(model)
        return respond(Loaded(model, True))

    @routes.post(
        "/v2/repository/models/{model}/unload",
        operation_id="v2_unload",
        summary="Unloads a model.",
        description="Requests for an unloaded model get 404 until it is loaded again.",
        openapi_extra=_describe(
            response_schema(Unloaded), "UnloadRequest", {"unload_dependents": FLAG}
        ),
    )
    async def unload(request: Request, model: str) -> Response:
        models.find(model)
        await _reject_parameters(request, "unload_dependents")  # no model has dependents
        models.load(model, loaded=False)
        return respond(Unloaded(model, True))

    return routes


def _describe(response: Schema, name: str, flags: dict[str, Schema]) -> dict[str, Any]:
    """Returns the description of an operation; `flags` are the parameters that it takes."""
    parameters = named(f"{name}Parameters", closed(flags, ()))
    request = named(name, closed({"parameters": nullable(parameters)}, ()))
    return describe_model(response, 400, body=in_json("Flags, without an effect.", request))


async def _read_fields(request: Request, *known: str) -> dict[str, Any]:
    """Returns the fields of a body that may be empty."""
    text = bytes(await read_body(request, _MAX_BODY_BYTES, lambda _: None))
    fields = json.decode_fields(text) if text.strip() else {}
    for name in fields:
        if name not in known:
            raise InvalidContent(f"unknown field {name!r:.60}; known are {', '.join(known)}")
    return fields


async def _reject_parameters(request: Request, *known: str) -> None:
    """Raises InvalidContent if a body has parameters other than the known flags.

    Triton's parameters replace a configuration or files of a model, which is not supported.
    """
    parameters = (await _read_fields(request, "parameters")).get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidContent("parameters must be an object")
    for name, value in (parameters or {}).items():
        if name not in known:
            raise InvalidContent(
                f"parameter {name!r:.60} is not supported: a model's configuration is fixed"
            )
        if not isinstance(value, bool):
            raise InvalidContent(f"parameter {name!r} must be true or false")
