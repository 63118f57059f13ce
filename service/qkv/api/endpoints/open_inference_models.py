"""The Open Inference Protocol below `/v2`: server, models and statistics.

Sources: the protocol's REST specification (github.com/kserve/open-inference-protocol), and
Triton's extensions model_configuration and statistics
(github.com/triton-inference-server/server, docs/protocol).
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response
from pydantic_core import to_json

from qkv.api.endpoints.open_inference_repository import (
    LAYER_VARIANT,
    VERSION,
    Model,
    ModelCatalogue,
    datatype_of,
    default_output,
)
from qkv.api.openapi.open_inference_operation import error_responses, new_router
from qkv.api.openapi.operation import variant_name
from qkv.api.request_body import record_response
from qkv.attention import catalogue
from qkv.attention.signature import fixed_size
from qkv.engine.job_executor import JobExecutor
from qkv.errors import ServiceUnavailable
from qkv.telemetry.counters import Counters
from qkv.telemetry.model_statistics import triton_statistics
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__
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


async def _version(request: Request) -> str:
    version: str = request.path_params.get("version", VERSION)
    return version


Version = Annotated[str, Depends(_version)]
"""The version in the path, which may have none."""


def router(engine: JobExecutor, shared_state: SharedState, models: ModelCatalogue) -> APIRouter:
    """Returns the routes of the server and of the models, other than inference."""
    routes = new_router()
    _add_server(routes, engine, shared_state)
    _add_models(routes, engine, shared_state, models)
    return routes


def _add_server(routes: APIRouter, engine: JobExecutor, shared_state: SharedState) -> None:
    @routes.get(
        "/v2",
        summary="Returns the server's name, version and extensions.",
        response_description="OK.",
        responses=error_responses(500, 503),
    )
    @routes.get("/v2/", include_in_schema=False)
    async def server() -> ServerMetadata:
        return ServerMetadata(name="qkv", version=__version__, extensions=_EXTENSIONS)

    @routes.get(
        "/v2/health/live",
        operation_id="v2_live",
        summary="Liveness: no worker is stuck.",
        response_model=ServerLive,
        response_description="OK.",
        responses=_health_responses(ServerLive),
    )
    async def live() -> Response:
        is_good = engine.is_alive and not shared_state.stuck_processes
        return record_response(ServerLive(live=is_good), 200 if is_good else 503)

    @routes.get(
        "/v2/health/ready",
        summary="Readiness: every worker accepts requests, and a device runs them.",
        response_model=ServerReady,
        response_description="OK.",
        responses=_health_responses(ServerReady),
    )
    async def ready() -> Response:
        is_good = engine.is_ready and shared_state.is_ready
        health = ServerReady(live=engine.is_alive, ready=is_good)
        return record_response(health, 200 if is_good else 503)


def _add_models(
    routes: APIRouter, engine: JobExecutor, shared_state: SharedState, models: ModelCatalogue
) -> None:
    counters = shared_state.counters
    name: Any = variant_name()

    @routes.get(
        "/v2/models",
        summary="Lists the loaded models.",
        response_description="OK.",
        responses=error_responses(500, 503),
    )
    async def models_listed() -> ModelList:
        return ModelList(models=models.loaded_names)

    @routes.get(
        "/v2/models/stats",
        operation_id="v2_statistics",
        summary="Returns the statistics of every loaded model.",
        response_description="OK.",
        responses=error_responses(500, 503),
    )
    async def statistics() -> StatisticsResponse:
        return _statistics(counters, *models.loaded_names)

    @routes.get(
        "/v2/models/{model}",
        summary="Returns a model's inputs and outputs.",
        response_description="OK.",
        responses=error_responses(404, 500, 503),
    )
    @routes.get("/v2/models/{model}/versions/{version}", include_in_schema=False)
    async def model_metadata(model: name, version: Version) -> ModelMetadata:
        return _metadata(models.find_loaded(model, version))

    @routes.get(
        "/v2/models/{model}/ready",
        operation_id="v2_model_ready",
        summary="Readiness of a model.",
        response_model=ModelReady,
        response_description="OK.",
        responses={
            **error_responses(404, 500, 503),
            400: {
                "model": ModelNotReady | ModelError,
                "description": "The model is unloaded, or the request is invalid.",
            },
        },
    )
    @routes.get("/v2/models/{model}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(model: name, version: Version) -> Response:
        models.find(model, version)
        if not (engine.is_ready and shared_state.is_ready):
            raise ServiceUnavailable("the service is not ready")
        if models.is_loaded(model):
            return record_response(ModelReady(name=model, ready=True))
        unloaded = ModelNotReady(error=f"{model} is not loaded", name=model, ready=False)
        return record_response(unloaded, 400)  # Triton's status

    @routes.get(
        "/v2/models/{model}/config",
        operation_id="v2_model_config",
        summary="Returns a model's configuration in Triton's form.",
        response_description="OK.",
        responses=error_responses(404, 500, 503),
    )
    @routes.get("/v2/models/{model}/versions/{version}/config", include_in_schema=False)
    async def model_config(model: name, version: Version) -> ModelConfig:
        instances = shared_state.engine_count
        return _config(models.find_loaded(model, version), engine, instances)

    @routes.get(
        "/v2/models/{model}/stats",
        operation_id="v2_model_statistics",
        summary="Returns a model's statistics.",
        response_description="OK.",
        responses=error_responses(404, 500, 503),
    )
    @routes.get("/v2/models/{model}/versions/{version}/stats", include_in_schema=False)
    async def model_statistics(model: name, version: Version) -> StatisticsResponse:
        models.find_loaded(model, version)
        return _statistics(counters, model)


def _health_responses(model: type[ServerLive | ServerReady]) -> dict[int | str, dict[str, Any]]:
    return {503: {"model": model, "description": "The check fails."}, **error_responses(500)}


def _metadata(model: Model) -> ModelMetadata:
    return ModelMetadata(
        name=model.name,
        versions=[VERSION],
        platform="qkv",
        inputs=tuple(
            InputMetadata(
                name=spec.name,
                datatype=datatype_of(spec.dtypes),
                shape=_sizes(spec.letters),
                parameters=InputParameters(
                    datatypes=[DATATYPES[d] for d in spec.dtypes],
                    axes=spec.letters,
                    optional=spec.is_optional,
                ),
            )
            for spec in model.inputs
        ),
        outputs=tuple(
            OutputMetadata(
                name=name,
                datatype=datatype,
                shape=_sizes(letters),
                parameters=OutputParameters(
                    axes=letters, on_request=name != default_output(model.variant)
                ),
            )
            for name, letters, datatype in model.outputs
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
        version_policy=VersionPolicy(latest={"num_versions": 1}),
        max_batch_size=0,
        input=tuple(
            InputConfig(
                name=i.name,
                data_type=f"TYPE_{datatype_of(i.dtypes)}",
                dims=_sizes(i.letters),
                optional=i.is_optional,
            )
            for i in model.inputs
        ),
        output=tuple(
            OutputConfig(name=name, data_type=f"TYPE_{datatype}", dims=_sizes(letters))
            for name, letters, datatype in model.outputs
        ),
        instance_group=(
            ModelInstances(
                name=model.name,
                # of one kind
                kind="KIND_CPU" if engine.device_name.startswith("cpu") else "KIND_GPU",
                count=instances,
            ),
        ),
        parameters={  # pydantic's encoder: a bound may exceed 64 bits
            name: StringValue(string_value=to_json(about).decode())
            for name, about in schema.items()
        },
        model_transaction_policy=TransactionPolicy(decoupled=False),
    )


def _statistics(counters: Counters, *names: str) -> StatisticsResponse:
    return StatisticsResponse(
        model_stats=tuple(
            ModelStatistics.parse(
                {"name": name, "version": VERSION} | triton_statistics(counters, name)
            )
            for name in names
        )
    )


def _sizes(letters: tuple[str, ...]) -> list[int]:
    """Returns the size of each axis; -1: any size."""
    return [fixed_size(letter) or -1 for letter in letters]
