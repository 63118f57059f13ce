"""The Open Inference Protocol below `/v2`: server, models and statistics.

Sources: the protocol's REST specification (github.com/kserve/open-inference-protocol), and
Triton's extensions model_configuration and statistics
(github.com/triton-inference-server/server, docs/protocol).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Response
from pydantic_core import to_json

from qkv.api.endpoints.open_inference_catalogue import (
    LAYER_VARIANT,
    VERSION,
    Model,
    ModelCatalogue,
    default_output,
)
from qkv.api.openapi.open_inference_operation import (
    describe_health,
    describe_model,
    describe_server,
)
from qkv.api.openapi.operation import in_json
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import either
from qkv.attention import catalogue
from qkv.attention.signature import fixed_size
from qkv.engine.job_executor import JobExecutor
from qkv.errors import QkvError, ServiceUnavailable
from qkv.jobs.state import SUMS
from qkv.telemetry.model_stats import ModelStats
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__
from qkv.wire import json
from qkv.wire.open_inference import DATATYPES
from qkv.wire.open_inference_responses import (
    InputConfig,
    InputMetadata,
    InputParameters,
    ModelConfig,
    ModelError,
    ModelInstances,
    ModelList,
    ModelMetadata,
    ModelNotReady,
    ModelReady,
    ModelStatistics,
    OutputConfig,
    OutputMetadata,
    OutputParameters,
    ServerLive,
    ServerMetadata,
    ServerReady,
    StatisticsResponse,
    StringValue,
    TransactionPolicy,
    VersionPolicy,
)

__all__ = [
    "HEALTH_PATHS",
    "new_router",
    "open_inference_error_response",
    "respond",
    "router",
]

HEALTH_PATHS: Final = ("/v2/health/live", "/v2/health/ready")
"""The paths of the probes of the server."""

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)
# of the dtypes that a tensor may have
_PREFERRED_DTYPES: Final = ("bool", "float32", "int64", "float64")


def open_inference_error_response(error: QkvError) -> Response:
    """Returns an error in the protocol's form, with Triton's statuses.

    Those are 400 for any invalid request, and 503 also for an exceeded deadline.
    """
    status = {406: 400, 415: 400, 422: 400, 504: 503}.get(error.status, error.status)
    body = ModelError(error.problem()["detail"])  # `problem` truncates it
    return Response(json.dump(body), status, error.headers(), media_type=json.MEDIA_TYPE)


def new_router() -> APIRouter:
    """Returns a router of the protocol; its operation ids are `v2_` and the function's name."""
    return APIRouter(
        tags=["open inference protocol"], generate_unique_id_function=lambda r: f"v2_{r.name}"
    )


def router(engine: JobExecutor, shared_state: SharedState, models: ModelCatalogue) -> APIRouter:
    """Returns the routes of the server and of the models, other than inference."""
    routes = new_router()
    _add_server(routes, engine, shared_state)
    _add_models(routes, engine, shared_state, models)
    return routes


def respond(body: Any, status: int = 200) -> Response:
    """Returns a response of JSON."""
    return Response(json.dump(body), status, media_type=json.MEDIA_TYPE)


def _add_server(routes: APIRouter, engine: JobExecutor, shared_state: SharedState) -> None:
    @routes.get(
        "/v2",
        summary="Returns the server's name, version and extensions.",
        openapi_extra=describe_server(response_schema(ServerMetadata)),
    )
    @routes.get("/v2/", include_in_schema=False)
    async def server() -> Response:
        return respond(ServerMetadata("qkv", __version__, _EXTENSIONS))

    @routes.get(
        "/v2/health/live",
        operation_id="v2_live",
        summary="Liveness: no worker is stuck.",
        openapi_extra=describe_health(ServerLive),
    )
    async def live() -> Response:
        is_good = engine.is_alive and not shared_state.stuck_processes
        return respond(ServerLive(is_good), 200 if is_good else 503)

    @routes.get(
        "/v2/health/ready",
        summary="Readiness: every worker accepts requests, and a device runs them.",
        openapi_extra=describe_health(ServerReady),
    )
    async def ready() -> Response:
        is_good = engine.is_ready and shared_state.is_ready
        return respond(ServerReady(engine.is_alive, is_good), 200 if is_good else 503)


def _add_models(
    routes: APIRouter, engine: JobExecutor, shared_state: SharedState, models: ModelCatalogue
) -> None:
    stats = shared_state.models

    @routes.get(
        "/v2/models",
        summary="Lists the loaded models.",
        openapi_extra=describe_server(response_schema(ModelList)),
    )
    async def models_listed() -> Response:
        names = [name for name in models.names if models.is_loaded(name)]
        return respond(ModelList(names))

    @routes.get(
        "/v2/models/stats",
        operation_id="v2_statistics",
        summary="Returns the statistics of every loaded model.",
        openapi_extra=describe_server(response_schema(StatisticsResponse)),
    )
    async def statistics() -> Response:
        names = [name for name in models.names if models.is_loaded(name)]
        return respond(_statistics(stats, *names))

    @routes.get(
        "/v2/models/{model}",
        summary="Returns a model's inputs and outputs.",
        openapi_extra=describe_model(response_schema(ModelMetadata)),
    )
    @routes.get("/v2/models/{model}/versions/{version}", include_in_schema=False)
    async def model_metadata(model: str, version: str = VERSION) -> Response:
        return respond(_metadata(models.find_loaded(model, version)))

    @routes.get(
        "/v2/models/{model}/ready",
        operation_id="v2_model_ready",
        summary="Readiness of a model.",
        openapi_extra=_describe_model_ready(),
    )
    @routes.get("/v2/models/{model}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(model: str, version: str = VERSION) -> Response:
        models.find(model, version)
        if not (engine.is_ready and shared_state.is_ready):
            raise ServiceUnavailable("the service is not ready")
        if models.is_loaded(model):
            return respond(ModelReady(model, True))
        unloaded = ModelNotReady(f"{model} is not loaded", model, False)
        return respond(unloaded, 400)  # Triton's status

    @routes.get(
        "/v2/models/{model}/config",
        operation_id="v2_model_config",
        summary="Returns a model's configuration in Triton's form.",
        openapi_extra=describe_model(response_schema(ModelConfig)),
    )
    @routes.get("/v2/models/{model}/versions/{version}/config", include_in_schema=False)
    async def model_config(model: str, version: str = VERSION) -> Response:
        instances = shared_state.engine_count
        return respond(_config(models.find_loaded(model, version), engine, instances))

    @routes.get(
        "/v2/models/{model}/stats",
        operation_id="v2_model_statistics",
        summary="Returns a model's statistics.",
        openapi_extra=describe_model(response_schema(StatisticsResponse)),
    )
    @routes.get("/v2/models/{model}/versions/{version}/stats", include_in_schema=False)
    async def model_statistics(model: str, version: str = VERSION) -> Response:
        models.find_loaded(model, version)
        return respond(_statistics(stats, model))


def _describe_model_ready() -> dict[str, Any]:
    """Returns the description of the probe of a model."""
    described = describe_model(response_schema(ModelReady))
    unloaded = either(response_schema(ModelNotReady), response_schema(ModelError))
    described["responses"]["400"] = in_json(
        "The model is unloaded, or the request is invalid.", unloaded
    )
    return described


def _metadata(model: Model) -> ModelMetadata:
    return ModelMetadata(
        name=model.name,
        versions=[VERSION],
        platform="qkv",
        inputs=tuple(
            InputMetadata(
                spec.name,
                _datatype(spec.dtypes),
                _sizes(spec.letters),
                InputParameters(
                    [DATATYPES[d] for d in spec.dtypes], list(spec.letters), spec.is_optional
                ),
            )
            for spec in model.inputs
        ),
        outputs=tuple(
            OutputMetadata(
                name,
                datatype,
                _sizes(letters),
                OutputParameters(list(letters), name != default_output(model.variant)),
            )
            for name, letters, datatype in _outputs(model)
        ),
    )


def _config(model: Model, engine: JobExecutor, instances: int) -> ModelConfig:
    schema = dict(model.variant.parameters.model_json_schema()["properties"])
    if model.layer is not None:
        schema["variant"] = {"default": LAYER_VARIANT, "enum": list(catalogue.variants())}
    return ModelConfig(
        name=model.name,
        platform="",
        backend="qkv",
        version_policy=VersionPolicy({"num_versions": 1}),
        max_batch_size=0,
        input=tuple(
            InputConfig(i.name, f"TYPE_{_datatype(i.dtypes)}", _sizes(i.letters), i.is_optional)
            for i in model.inputs
        ),
        output=tuple(
            OutputConfig(name, f"TYPE_{datatype}", _sizes(letters))
            for name, letters, datatype in _outputs(model)
        ),
        instance_group=(
            ModelInstances(
                model.name,
                "KIND_CPU" if engine.device_name.startswith("cpu") else "KIND_GPU",  # of one kind
                instances,
            ),
        ),
        parameters={  # pydantic's encoder: a bound may exceed 64 bits
            name: StringValue(to_json(about).decode()) for name, about in schema.items()
        },
        model_transaction_policy=TransactionPolicy(False),
    )


def _statistics(models: ModelStats, *names: str) -> StatisticsResponse:
    return StatisticsResponse(
        tuple(
            msgspec.convert(
                {"name": name, "version": VERSION} | models.statistics(name), ModelStatistics
            )
            for name in names
        )
    )


def _outputs(model: Model) -> list[tuple[str, tuple[str, ...], str]]:
    """Returns name, axes and datatype of each output, those of a state and the steps included."""
    groups = model.variant.groups.values()
    return [
        *((o.name, o.letters, "FP32") for o in model.outputs),
        *(
            (name, spec.letters, "FP64" if name == SUMS else _datatype(spec.dtypes))
            for specs in groups
            for name, spec in specs.items()
        ),
    ]


def _sizes(letters: tuple[str, ...]) -> list[int]:
    """Returns the size of each axis; -1: any size."""
    return [fixed_size(letter) or -1 for letter in letters]


def _datatype(dtypes: tuple[str, ...]) -> str:
    """Returns the datatype to report: the protocol has one for each tensor."""
    return DATATYPES[next(dtype for dtype in _PREFERRED_DTYPES if dtype in dtypes)]
