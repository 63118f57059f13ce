"""/v2: what the Open Inference Protocol says of the server, its models and their statistics.

Sources: the protocol's REST specification (github.com/kserve/open-inference-protocol), and
Triton's extensions model_configuration, model_repository and statistics
(github.com/triton-inference-server/server, docs/protocol).
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from qkv.api.request_body import read_body
from qkv.attention import catalogue
from qkv.attention.catalogue import Input, Output, Variant, fixed_size
from qkv.engine.engine import Engine
from qkv.engine.remote.remote_engine import RemoteEngine
from qkv.errors import InvalidContent, NotFound, QkvError, ServiceUnavailable
from qkv.telemetry.model_stats import ModelStats
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__
from qkv.wire import json
from qkv.wire.open_inference import DATATYPES

__all__ = [
    "HEALTH_PATHS",
    "VERSION",
    "default_output",
    "find_loaded",
    "new_router",
    "oip_error_response",
    "router",
]

VERSION: Final = "1"
"""The one version that every model has."""

HEALTH_PATHS: Final = ("/v2/health/live", "/v2/health/ready")
"""The paths that are served while the service drains."""

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)
_MAX_BODY_BYTES: Final = 1 << 16
_PREFERRED_DTYPES: Final = ("bool", "float32", "int64")  # of the dtypes that a tensor may have


def find_loaded(models: ModelStats, name: str, version: str = VERSION) -> Variant:
    """The variant behind a model that answers.

    Raises:
        NotFound: no such model, no such version, or it is unloaded.
    """
    variant = _find(models, name, version)
    if not models.is_loaded(name):
        raise NotFound(f"Request for unknown model: {name!r} has no available versions")
    return variant


def oip_error_response(error: QkvError) -> Response:
    """An error as the protocol writes it, with the statuses that Triton uses: 400 for whatever is
    wrong with a request, 503 also where its time was up."""
    status = {406: 400, 415: 400, 422: 400, 504: 503}.get(error.status, error.status)
    text = json.dump({"error": error.problem()["detail"]})  # cut
    return Response(text, status, error.headers(), media_type=json.MEDIA_TYPE)


def new_router() -> APIRouter:
    """A router of the protocol: operation ids are v2_ and the function's name."""
    return APIRouter(
        tags=["open inference protocol"], generate_unique_id_function=lambda r: f"v2_{r.name}"
    )


def router(engine: Engine | RemoteEngine, shared_state: SharedState) -> APIRouter:
    """The routes."""
    routes = new_router()
    _add_server(routes, engine, shared_state)
    _add_models(routes, engine, shared_state)
    _add_repository(routes, shared_state.models)
    return routes


def _add_server(
    routes: APIRouter, engine: Engine | RemoteEngine, shared_state: SharedState
) -> None:
    @routes.get("/v2", summary="What serves, and which extensions it has.")
    @routes.get("/v2/", include_in_schema=False)
    async def server() -> dict[str, Any]:
        return {"name": "qkv", "version": __version__, "extensions": _EXTENSIONS}

    @routes.get(
        "/v2/health/live",
        operation_id="v2_live",
        summary="Whether every worker lives: none is stuck.",
    )
    async def live(response: Response) -> dict[str, bool]:
        is_good = engine.is_alive and not shared_state.stuck_processes
        response.status_code = 200 if is_good else 503
        return {"live": is_good}

    @routes.get("/v2/health/ready", summary="Whether every worker takes requests.")
    async def ready(response: Response) -> dict[str, bool]:
        is_good = engine.is_ready and shared_state.is_ready
        response.status_code = 200 if is_good else 503
        return {
            "live": engine.is_alive,
            "ready": is_good,
        }  # the specification has the one, KServe the other


def _add_models(
    routes: APIRouter, engine: Engine | RemoteEngine, shared_state: SharedState
) -> None:
    models = shared_state.models

    @routes.get("/v2/models", summary="The models that answer.")
    async def models_listed() -> dict[str, list[str]]:
        return {"models": [name for name in models.names if models.is_loaded(name)]}

    @routes.get(
        "/v2/models/stats",
        operation_id="v2_statistics",
        summary="Statistics of every model that answers.",
    )
    async def statistics() -> dict[str, Any]:
        names = [name for name in models.names if models.is_loaded(name)]
        return {"model_stats": [_statistics(models, name) for name in names]}

    @routes.get("/v2/models/{model}", summary="A model's inputs and outputs.")
    @routes.get("/v2/models/{model}/versions/{version}", include_in_schema=False)
    async def model_metadata(model: str, version: str = VERSION) -> dict[str, Any]:
        return _metadata(find_loaded(models, model, version))

    @routes.get(
        "/v2/models/{model}/ready",
        operation_id="v2_model_ready",
        summary="Whether a model answers.",
    )
    @routes.get("/v2/models/{model}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(response: Response, model: str, version: str = VERSION) -> dict[str, Any]:
        _find(models, model, version)
        if not (engine.is_ready and shared_state.is_ready):
            raise ServiceUnavailable("the service is not ready")
        is_good = models.is_loaded(model)
        if not is_good:  # Triton's status
            response.status_code = 400
            return {"error": f"{model} is not loaded", "name": model, "ready": False}
        return {"name": model, "ready": True}

    @routes.get(
        "/v2/models/{model}/config",
        operation_id="v2_model_config",
        summary="A model's configuration, as Triton has it.",
    )
    @routes.get("/v2/models/{model}/versions/{version}/config", include_in_schema=False)
    async def model_config(model: str, version: str = VERSION) -> dict[str, Any]:
        instances = 1 if isinstance(engine, RemoteEngine) else len(shared_state)
        return _config(find_loaded(models, model, version), engine, instances)

    @routes.get(
        "/v2/models/{model}/stats",
        operation_id="v2_model_statistics",
        summary="A model's statistics.",
    )
    @routes.get("/v2/models/{model}/versions/{version}/stats", include_in_schema=False)
    async def model_statistics(model: str, version: str = VERSION) -> dict[str, Any]:
        find_loaded(models, model, version)
        return {"model_stats": [_statistics(models, model)]}


def _add_repository(routes: APIRouter, models: ModelStats) -> None:
    @routes.post("/v2/repository/index", summary="Every model, loaded or not.")
    async def index(request: Request) -> list[dict[str, str]]:
        fields = await _read_fields(request, "ready")
        if not isinstance(fields.get("ready", False), bool):
            raise InvalidContent("ready must be true or false")
        loaded = {name: models.is_loaded(name) for name in models.names}
        return [
            {
                "name": name,
                "version": VERSION,
                "state": "READY" if loaded[name] else "UNAVAILABLE",
                "reason": "" if loaded[name] else "unloaded",
            }
            for name in models.names
            if loaded[name] or not fields.get("ready")
        ]

    @routes.post(
        "/v2/repository/models/{model}/load",
        operation_id="v2_load",
        summary="Has a model answer again.",
    )
    async def load(request: Request, model: str) -> dict[str, Any]:
        _find(models, model, VERSION)
        await _reject_parameters(request)
        models.load(model)
        return {"name": model, "load": True}

    @routes.post(
        "/v2/repository/models/{model}/unload",
        operation_id="v2_unload",
        summary="Has a model answer no more.",
    )
    async def unload(request: Request, model: str) -> dict[str, Any]:
        _find(models, model, VERSION)
        await _reject_parameters(request, "unload_dependents")  # there are none
        models.load(model, loaded=False)
        return {"name": model, "unload": True}


def _find(models: ModelStats, name: str, version: str) -> Variant:
    if name not in models:
        raise NotFound(f"Request for unknown model: {name!r:.60} is not found")
    if version != VERSION:
        raise NotFound(
            f"Request for unknown model: {name!r} version {version!r:.20} is not found; "
            f"there is version {VERSION}"
        )
    return catalogue.find(name)


async def _read_fields(request: Request, *known: str) -> dict[str, Any]:
    """The fields of a body that may be empty."""
    text = bytes(await read_body(request, _MAX_BODY_BYTES, lambda _: None))
    fields = json.decode_fields(text) if text.strip() else {}
    for name in fields:
        if name not in known:
            raise InvalidContent(f"unknown field {name!r:.60}; known are {', '.join(known)}")
    return fields


async def _reject_parameters(request: Request, *known: str) -> None:
    """Parameters would change what is loaded: no configuration and no file is taken. Those that
    are known are flags."""
    parameters = (await _read_fields(request, "parameters")).get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidContent("parameters must be an object")
    for name, value in (parameters or {}).items():
        if name not in known:
            raise InvalidContent(
                f"parameter {name!r:.60} is not taken: every model is as its file says"
            )
        if not isinstance(value, bool):
            raise InvalidContent(f"parameter {name!r} must be true or false")


def _metadata(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "versions": [VERSION],
        "platform": "qkv",
        "inputs": [
            {
                "name": spec.name,
                "datatype": _datatype(spec.dtypes),
                "shape": [fixed_size(x) or -1 for x in spec.letters],
                "parameters": {
                    "datatypes": [DATATYPES[d] for d in spec.dtypes],
                    "axes": list(spec.letters),
                    "optional": spec.is_optional,
                },
            }
            for spec in variant.inputs.values()
        ],
        "outputs": [
            {
                "name": spec.name,
                "datatype": "FP32",
                "shape": [fixed_size(x) or -1 for x in spec.letters],
                "parameters": {
                    "axes": list(spec.letters),
                    "on_request": spec.name != default_output(variant),
                },
            }
            for spec in variant.outputs.values()
        ],
    }


def default_output(variant: Variant) -> str:
    """What is returned where a request names no output."""
    return "output" if "output" in variant.outputs else next(iter(variant.outputs))


def _config(variant: Variant, engine: Engine | RemoteEngine, instances: int) -> dict[str, Any]:
    """ModelConfig, as Triton's model_config.proto defines it. max_batch_size is 0: B is an axis
    like any other, and batches form of requests, not of their items."""

    def tensor(spec: Input | Output, datatype: str) -> dict[str, Any]:
        return {
            "name": spec.name,
            "data_type": f"TYPE_{datatype}",
            "dims": [fixed_size(x) or -1 for x in spec.letters],
        }

    kind = "KIND_CPU" if engine.device.type == "cpu" else "KIND_GPU"
    schema = variant.parameters.model_json_schema()["properties"]
    return {
        "name": variant.name,
        "platform": "",
        "backend": "qkv",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            tensor(i, _datatype(i.dtypes)) | {"optional": i.is_optional}
            for i in variant.inputs.values()
        ],
        "output": [tensor(o, "FP32") for o in variant.outputs.values()],
        "instance_group": [{"name": variant.name, "kind": kind, "count": instances}],
        "parameters": {  # pydantic's writer: a bound may be past 64 bits
            name: {"string_value": to_json(about).decode()} for name, about in schema.items()
        },
        "model_transaction_policy": {"decoupled": False},
    }


def _statistics(models: ModelStats, name: str) -> dict[str, Any]:
    return {"name": name, "version": VERSION} | models.statistics(name)


def _datatype(dtypes: tuple[str, ...]) -> str:
    """The one datatype that the protocol has room for, of those that a tensor may have."""
    return DATATYPES[next(dtype for dtype in _PREFERRED_DTYPES if dtype in dtypes)]
