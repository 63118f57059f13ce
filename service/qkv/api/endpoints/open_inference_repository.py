"""The model repository below `/v2`: lists, loads and unloads models.

Source: Triton's extension model_repository (github.com/triton-inference-server/server,
docs/protocol).
"""

from typing import Annotated, Any, Final

import pydantic
from fastapi import APIRouter

from qkv.api.bodies import BodyFormat, body_route
from qkv.api.endpoints.open_inference_catalogue import VERSION, ModelCatalogue
from qkv.api.endpoints.open_inference_models import new_router
from qkv.api.openapi.open_inference_operation import error_responses
from qkv.api.openapi.operation import variant_name
from qkv.errors import InvalidContent
from qkv.wire.open_inference_responses import Loaded, RepositoryModel, Unloaded

__all__ = ["router"]

_MAX_BODY_BYTES: Final = 1 << 16
_FLAGS: Final = "Flags, without an effect."


class _Request(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


def _check_flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise InvalidContent("ready must be true or false")
    return value


class IndexRequest(_Request):
    """A filter."""

    ready: Annotated[bool, pydantic.BeforeValidator(_check_flag)] = False


class LoadRequestParameters(_Request):
    """No parameters."""


class UnloadRequestParameters(_Request):
    """Flags of an unload; no model has dependents."""

    unload_dependents: bool = False


def _check_flags(value: Any, known: type[pydantic.BaseModel]) -> Any:
    """Refuses parameters that replace a configuration or files of a model, as Triton's do."""
    if value is not None and not isinstance(value, dict):
        raise InvalidContent("parameters must be an object")
    for name, flag in (value or {}).items():
        if name not in known.model_fields:
            raise InvalidContent(
                f"parameter {name!r:.60} is not supported: a model's configuration is fixed"
            )
        if not isinstance(flag, bool):
            raise InvalidContent(f"parameter {name!r} must be true or false")
    return value


class LoadRequest(_Request):
    """The body of a load."""

    parameters: Annotated[
        LoadRequestParameters | None,
        pydantic.BeforeValidator(
            lambda value: _check_flags(value, LoadRequestParameters),
            json_schema_input_type=LoadRequestParameters | None,
        ),
    ] = None


class UnloadRequest(_Request):
    """The body of an unload."""

    parameters: Annotated[
        UnloadRequestParameters | None,
        pydantic.BeforeValidator(
            lambda value: _check_flags(value, UnloadRequestParameters),
            json_schema_input_type=UnloadRequestParameters | None,
        ),
    ] = None


# bodies may be empty
_NO_FILTER: Final = IndexRequest()
_NO_LOAD_FLAGS: Final = LoadRequest()
_NO_UNLOAD_FLAGS: Final = UnloadRequest()


def router(models: ModelCatalogue) -> APIRouter:
    """Returns the routes of the repository."""
    routes = new_router(body_route(None, BodyFormat(_MAX_BODY_BYTES, is_optional=True)))
    name: Any = variant_name()

    @routes.post(
        "/v2/repository/index",
        summary="Lists every model, loaded or not.",
        response_description="OK.",
        responses=error_responses(400, 500, 503),
        openapi_extra={"requestBody": {"description": "A filter."}},
    )
    async def index(body: IndexRequest = _NO_FILTER) -> list[RepositoryModel]:
        loaded = {name: models.is_loaded(name) for name in models.names}
        return [
            RepositoryModel(
                name=name,
                version=VERSION,
                state="READY" if loaded[name] else "UNAVAILABLE",
                reason="" if loaded[name] else "unloaded",
            )
            for name in models.names
            if loaded[name] or not body.ready
        ]

    @routes.post(
        "/v2/repository/models/{model}/load",
        operation_id="v2_load",
        summary="Loads a model.",
        response_description="OK.",
        responses=error_responses(400, 404, 500, 503),
        openapi_extra={"requestBody": {"description": _FLAGS}},
    )
    async def load(model: name, body: LoadRequest = _NO_LOAD_FLAGS) -> Loaded:
        models.load(model)
        return Loaded(name=model, load=True)

    @routes.post(
        "/v2/repository/models/{model}/unload",
        operation_id="v2_unload",
        summary="Unloads a model.",
        description="Requests for an unloaded model get 404 until it is loaded again.",
        response_description="OK.",
        responses=error_responses(400, 404, 500, 503),
        openapi_extra={"requestBody": {"description": _FLAGS}},
    )
    async def unload(model: name, body: UnloadRequest = _NO_UNLOAD_FLAGS) -> Unloaded:
        models.load(model, loaded=False)
        return Unloaded(name=model, unload=True)

    return routes
