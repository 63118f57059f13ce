"""Builds the HTTP API: `create_app` combines engine, endpoints and middleware."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from qkv.api.auth import ApiKeyMiddleware, ApiKeys
from qkv.api.bodies import known_type
from qkv.api.endpoints import (
    compare,
    convert,
    health,
    layers,
    metrics,
    open_inference_infer,
    open_inference_models,
    open_inference_repository,
    playground,
    run,
    run_models,
    sweep,
    variants,
    verify,
)
from qkv.api.endpoints.open_inference_infer import InferHandler
from qkv.api.endpoints.open_inference_repository import ModelCatalogue
from qkv.api.endpoints.playground import SWAGGER_PATH
from qkv.api.error_responses import (
    ErrorMiddleware,
    handle_http_error,
    handle_validation_error,
)
from qkv.api.job_runner import JobRunner
from qkv.api.observability import ObservabilityMiddleware, RequestObserver
from qkv.api.openapi import document
from qkv.api.request_source import SourceRules
from qkv.api.routes import DirectRoute, DirectRouting
from qkv.api_keys import ValidApiKeys
from qkv.attention import catalogue
from qkv.engine import own_variants
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.selection import find_device, new_device
from qkv.engine.engine import GPU_MAX_BATCH, Engine
from qkv.engine.job_executor import JobExecutor
from qkv.engine.remote.device_process import DeviceProcess
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.errors import InvalidContent
from qkv.jobs.layers import LayersRequest
from qkv.jobs.load import Load
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.settings import Settings
from qkv.telemetry.collector import ServiceCollector
from qkv.telemetry.log_writer import BackgroundWriter
from qkv.telemetry.worker_state import SharedState, WorkerState
from qkv.version import __version__

if TYPE_CHECKING:
    from qkv.telemetry.tracing import Traces

_PLAIN: Final[dict[str, Any]] = {
    "redirect_slashes": False,
    # qkv has spans and metrics of its own; FastAPI's would be a second set
    "telemetry": {"tracing": False, "metrics": False, "logs": False},
    "exception_handlers": {
        HTTPException: handle_http_error,
        RequestValidationError: handle_validation_error,
    },
}
"""What the applications of a process share."""
_LOG_INTERVAL_S: Final = 0.1  # seconds between writes of the request log


@dataclass(frozen=True)
class Runtime:
    """The objects that the requests of one process share.

    Attributes:
        settings: of the service.
        worker: this process's part of the shared state.
        engine: runs the jobs.
        job_runner: runs jobs for HTTP clients.
        api_keys: the valid keys; None: no authentication.
        observer: counts, logs and traces every request.
        request_log: gets a line for each request; None: no log.
        traces: gets a span for each request; None: no traces.
    """

    settings: Settings
    worker: WorkerState
    engine: JobExecutor
    job_runner: JobRunner
    api_keys: ApiKeys | None
    observer: RequestObserver
    request_log: BackgroundWriter | None
    traces: Traces | None


def create_app(
    settings: Settings | None = None,
    worker: WorkerState | None = None,
    remote: JobExecutor | None = None,
    layers: LoadedLayers | None = None,
    api_keys: ValidApiKeys | None = None,
) -> FastAPI:
    """Returns the service as an ASGI application.

    `app.state.runtime` is its `Runtime`.

    Args:
        settings: None reads them from the environment.
        worker: this process's part of the shared state; None: this is the only process.
        remote: the engine of the device processes; None: this process has an engine of its own.
        layers: that requests may name; None loads the checkpoints of the settings.
        api_keys: that requests may have; None reads those of the settings.

    Raises:
        ValueError, QkvError: as `load_layers`.
    """
    settings = settings or Settings()
    if worker is None:
        _add_variants(settings)  # before the layers, whose checkpoints have other names
    layers = load_layers(settings) if layers is None else layers
    if api_keys is None and settings.has_keys:
        api_keys = ValidApiKeys(settings.read_keys)
    runtime = _build_runtime(settings, worker, remote, layers, api_keys)
    routers, direct = _routers(runtime)
    inner = [Middleware(DirectRouting, routes=direct)]
    if runtime.api_keys is not None:
        inner.insert(0, Middleware(ApiKeyMiddleware, api_keys=runtime.api_keys))
    app = FastAPI(
        openapi_url=None,  # `_add_document` has it
        docs_url=None,  # the playground has the page, which sends the user's key
        redoc_url=None,
        title="qkv",
        version=__version__,
        summary="Runs attention variants: output, weights and timing.",
        description=document.DESCRIPTION,
        openapi_tags=document.TAGS,
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        lifespan=lambda _: _running(runtime),
        middleware=_middleware(runtime, *inner),
        # not `include_router`, which makes each route a second time
        routes=[route for router in routers for route in router.routes],
        **_PLAIN,
    )
    app.state.runtime = runtime
    # Swagger UI's files, so that the page sends no request to another host
    static = StaticFiles(packages=[("fastapi_offline", "static")])
    app.mount(SWAGGER_PATH, GZipMiddleware(static))
    _add_document(app, is_guarded=runtime.api_keys is not None)
    return app


def build_models() -> None:
    """Builds the models of bodies and responses, which the processes forked later then have.

    They take most of the time in which a worker creates its application.
    """
    run_models.build(catalogue.variants().values())
    drawn_or_judged, _ = verify.new_models()
    other = (convert.BODY_TYPE, LayersRequest)
    for body_type in (compare.new_body_type(), sweep.new_body_type(), drawn_or_judged, *other):
        known_type(body_type)
    variants.router()  # FastAPI imports more modules when it makes its first route


def load_layers(settings: Settings) -> LoadedLayers:
    """Returns the layers of the checkpoints of the settings. Call it before the forks.

    Raises:
        ValueError: a checkpoint has the name of a variant.
        QkvError: one cannot be loaded, and `strict_checkpoints`.
    """
    return load_checkpoints(
        settings.checkpoint_paths,
        settings.max_checkpoint_bytes,
        is_strict=settings.strict_checkpoints,
    )


def _build_runtime(
    settings: Settings,
    worker: WorkerState | None,
    remote: JobExecutor | None,
    layers: LoadedLayers,
    api_keys: ValidApiKeys | None,
) -> Runtime:
    if worker is None:
        worker = new_shared_state(settings, 1, layers=layers.names).worker(0)
        worker.set_ready(True)
    engine: JobExecutor = remote or _new_engine(settings, settings.device, worker, layers)
    engine.admission.body_timeout_s = settings.read_timeout_s
    recorder = worker.recorder
    request_log = None
    if settings.request_log == "json":
        request_log = BackgroundWriter(1, recorder.add_dropped_log_lines, _LOG_INTERVAL_S)
    traces = import_module("qkv.telemetry.tracing").Traces() if settings.traces else None
    return Runtime(
        settings=settings,
        worker=worker,
        engine=engine,
        job_runner=JobRunner(engine, settings, worker, layers),
        api_keys=None if api_keys is None else ApiKeys(api_keys, recorder.add_key),
        observer=RequestObserver(recorder, request_log, traces),
        request_log=request_log,
        traces=traces,
    )


def _add_variants(settings: Settings) -> None:
    """Adds the variants of the folder of the settings, if there is one.

    Raises:
        QkvError: a file cannot be used, or fails its checks.
    """
    if settings.variants is not None:
        for variant in own_variants.add_folder(settings.variants):
            if failure := own_variants.failure(variant):
                raise InvalidContent(failure)


@asynccontextmanager
async def _running(runtime: Runtime) -> AsyncIterator[None]:
    """Runs the engine and the background tasks of a process while its server runs."""
    engine, worker = runtime.engine, runtime.worker
    engine.start()
    heartbeat = asyncio.create_task(worker.run_heartbeat(engine.memory_usage))
    if runtime.request_log is not None:
        runtime.request_log.start()
    failure = asyncio.create_task(_watch_device(engine, worker))
    try:
        await engine.prepare(worker)
        yield
    finally:
        await engine.stop()
        heartbeat.cancel()
        if runtime.request_log is not None:
            await asyncio.to_thread(runtime.request_log.stop)
        if runtime.traces is not None:
            await runtime.traces.stop()
        failure.cancel()


async def _watch_device(engine: JobExecutor, worker: WorkerState) -> None:
    """Marks this process as not ready after its device has failed permanently."""
    await engine.failed.wait()
    worker.set_ready(False)


def _routers(runtime: Runtime) -> tuple[list[APIRouter], dict[str, DirectRoute]]:
    """Returns the routers of all resources, and the handlers that run variants by path."""
    settings, engine, job_runner = runtime.settings, runtime.engine, runtime.job_runner
    shared_state = runtime.worker.shared_state
    handler = run.RunHandler(job_runner, settings)
    models = ModelCatalogue(shared_state, job_runner.limits.layers)
    runs = [run.attention_router(handler), run.gradients_router(handler)]
    infer = open_inference_infer.router(job_runner, InferHandler(job_runner, models, settings))
    direct = {r.path: (r.get_route_handler(), dict[str, str]()) for r in _api_routes(*runs)}
    infer_route, *_ = _api_routes(infer)
    for name in models.names:
        handle = infer_route.get_route_handler()
        direct[f"/v2/models/{name}/infer"] = handle, {"model": name}
    routers = [
        *runs,
        run.unknown_router(handler),
        infer,
        compare.router(job_runner, settings),
        sweep.router(job_runner, settings, shared_state),
        convert.router(job_runner, settings),
        layers.finding_router(job_runner, settings),
        layers.listing_router(job_runner.limits.layers),
        verify.router(job_runner, settings),
        variants.router(),
        health.router(engine, shared_state),
        playground.router(),
        metrics.router(ServiceCollector(shared_state, engine.device_name)),
        open_inference_models.router(engine, shared_state, models),
        open_inference_repository.router(models),
    ]
    return routers, direct


def _api_routes(*routers: APIRouter) -> list[APIRoute]:
    return [r for router in routers for r in router.routes if isinstance(r, APIRoute)]


def new_metrics_app(runtime: Runtime) -> FastAPI:
    """Returns an application with GET /metrics alone, which needs no key.

    Args:
        runtime: that of the service.
    """
    collector = ServiceCollector(runtime.worker.shared_state, runtime.engine.device_name)
    routes = metrics.router(collector).routes
    return FastAPI(openapi_url=None, middleware=_middleware(runtime), routes=routes, **_PLAIN)


def _middleware(runtime: Runtime, *inner: Middleware) -> list[Middleware]:
    """Returns the way of a request: from its record and the check of its source to `inner`.

    Args:
        runtime: of the service.
        *inner: the middlewares whose errors are answered.
    """
    settings = runtime.settings
    rules = SourceRules(settings.origins, settings.hosts, settings.host)
    return [
        Middleware(ObservabilityMiddleware, observer=runtime.observer, rules=rules),
        *_cors(settings.origins),
        Middleware(ErrorMiddleware),
        *inner,
    ]


def _cors(origins: list[str]) -> list[Middleware]:
    """Returns the middleware that lets pages of these origins call the service; none without any.

    It is outside the check of keys: a preflight request has none.
    """
    if not origins:
        return []
    exposed = ("ETag", "Inference-Header-Content-Length", "Retry-After", "Server-Timing")
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(*exposed, "X-Request-ID"),
        )
    ]


def _add_document(app: FastAPI, is_guarded: bool) -> None:
    """Replaces FastAPI's OpenAPI document, and adds its path."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document.build_document(app, is_guarded)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this way to extend it

    @app.get("/openapi.json", include_in_schema=False)
    async def get_document() -> Response:
        # the first time it takes most of a second, in which the event loop serves other requests
        return JSONResponse(await asyncio.to_thread(app.openapi))


def _new_engine(
    settings: Settings, device: str, worker: WorkerState, layers: LoadedLayers
) -> Engine:
    """Returns an engine of this process on the device of a name.

    Raises:
        ValueError: the device does not exist.
    """
    return Engine(
        new_device(find_device(device), settings.tf32, settings.max_device_layer_bytes),
        max_batch=settings.max_batch,
        threads=settings.threads,
        limit=queue_limits(settings),
        idle_threads=worker.idle_threads,
        on_busy=worker.set_busy,
        preload=[layers[name] for name in layers.names] if settings.preload else (),
        verifier=BatchVerifier(settings.verify_batches, worker.recorder.record_batch_check),
    )


def queue_limits(settings: Settings) -> Load:
    """Returns the limits of the queue of one process."""
    return Load(settings.max_queue, settings.max_queue_bytes, settings.max_queue_flops)


def new_device_process(
    settings: Settings,
    device: str,
    worker: WorkerState,
    shared_memory: SharedMemory,
    control_socket: socket.socket,
    parent_alive_fd: int,
    layers: LoadedLayers,
) -> DeviceProcess:
    """Returns the process that owns the device of a name and runs jobs of all workers.

    Raises:
        ValueError: the device does not exist.
    """
    engine = _new_engine(settings, device, worker, layers)
    return DeviceProcess(engine, worker, shared_memory, control_socket, parent_alive_fd, layers)


def new_shared_state(
    settings: Settings, workers: int, devices: Sequence[str] = (), layers: Sequence[str] = ()
) -> SharedState:
    """Returns the shared state of workers and device processes. Call it before the forks."""
    return SharedState(
        workers,
        settings.stuck_s,
        settings.stuck_device_s,
        variants=tuple(catalogue.variants()),
        max_batch_size=settings.max_batch or GPU_MAX_BATCH,
        devices=devices,
        layers=layers,
    )
