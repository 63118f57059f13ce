"""The model repository below `/v2`: lists, loads and unloads models.

Source: Triton's extension model_repository (github.com/triton-inference-server/server,
docs/protocol).
"""

from typing import Any, Final

import pydantic
from fastapi import APIRouter

from qkv.api.bodies import BodyFormat, body_route
from qkv.api.endpoints.open_inference_catalogue import VERSION, ModelCatalogue
from qkv.api.endpoints.open_inference_models import new_router
from qkv.api.openapi.open_inference_operation import error_responses
from qkv.api.openapi.operation import variant_name
from qkv.errors import InvalidContent
from qkv.wire.open_inference_responses import Loaded, RepositoryModel, Unloaded

_MAX_BODY_BYTES: Final = 1 << 16
_FLAGS: Final = "Flags, without an effect."


class _Request(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class IndexRequest(_Request):
    """A filter."""

    ready: bool = False


class _Flags(_Request):
    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_configurations(cls, value: Any) -> Any:
        """Refuses what replaces a configuration or files of a model, as Triton's parameters do."""
        if not isinstance(value, dict):
            raise InvalidContent("parameters must be an object")
        for name in value:
            if name not in cls.model_fields:
                raise InvalidContent(
                    f"parameter {name!r:.60} is not supported: a model's configuration is fixed"
                )
        return value


class LoadRequestParameters(_Flags):
    """No parameters."""


class UnloadRequestParameters(_Flags):
    """Flags of an unload; no model has dependents."""

    unload_dependents: bool = False


class LoadRequest(_Request):
    """The body of a load."""

    parameters: LoadRequestParameters | None = None


class UnloadRequest(_Request):
    """The body of an unload."""

    parameters: UnloadRequestParameters | None = None


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
