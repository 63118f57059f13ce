"""The application: puts engine and routes together and maps every error once."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from qkv.api.auth import Guard, Keys
from qkv.api.direct_routes import Endpoint, Front
from qkv.api.endpoints import (
    attention,
    compare,
    convert,
    gradients,
    metrics,
    playground,
    sweep,
    variants,
)
from qkv.api.endpoints import health as operations
from qkv.api.endpoints import oip_infer as infer
from qkv.api.endpoints import oip_models as v2
from qkv.api.endpoints.run import Native
from qkv.api.fast_path.run_cache import Shortcuts
from qkv.api.job_runner import Runs, limits_of
from qkv.api.observability import Observed, Observer, fails, request_id
from qkv.api.openapi import document as openapi
from qkv.attention import catalogue
from qkv.engine.engine import GPU_BATCH, Engine, pick_device
from qkv.engine.remote.device_process import DeviceProcess
from qkv.engine.remote.remote_engine import Remote
from qkv.engine.remote.shared_memory import Arena
from qkv.engine.warmup import warm_up
from qkv.engine.work_queue import Load
from qkv.errors import Internal, MethodNotAllowed, NotFound, NotNow, QkvError
from qkv.server.connection_timeouts import Watch
from qkv.server.cpus import usable_cpus
from qkv.server.fast_path.busy_poll import BusyPoll
from qkv.server.fast_path.pending_request import Round
from qkv.server.fast_path.protocol import Protocol
from qkv.settings import Settings
from qkv.telemetry.background_writer import Lines
from qkv.telemetry.worker_state import Fleet, Worker
from qkv.version import __version__
from qkv.wire import json

__all__ = ["create_app", "most_of", "new_device_process", "new_fleet"]

_log = logging.getLogger("qkv.app")

_EVERY_S: Final = 0.1  # lines of the request log are written
_STILL_ANSWERED: Final = ("/livez", "/readyz", *v2.PUBLIC)  # while the service ends


def create_app(
    settings: Settings | None = None, worker: Worker | None = None, remote: Remote | None = None
) -> FastAPI:
    """The service as an ASGI application.

    `app.state.engine` is its engine; `app.state.front` is the same application with a shorter way
    to what runs variants, and what a server should serve; `app.state.protocol` is how uvicorn
    should speak to connections, with a shorter way still.

    Args:
        settings: None reads them from the environment.
        worker: what this process is in its fleet; None: alone.
        remote: what has another process run jobs; None: an engine of its own runs them.
    """
    settings = settings or Settings()
    if worker is None:
        worker = new_fleet(settings, 1).worker(0)
        worker.ready(True)
    engine = remote or _new_engine(settings, worker)
    engine.door.patience_s = settings.read_timeout_s
    log = Lines(1, worker.meter.dropped, _EVERY_S) if settings.request_log == "json" else None
    traces = import_module("qkv.telemetry.tracing").Traces() if settings.traces else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        pulse = asyncio.create_task(worker.pulse(engine.usage))
        if log is not None:
            log.start()
        watch = asyncio.create_task(_watch(engine, worker))
        try:
            if isinstance(engine, Remote):
                await engine.until_ready()
            else:
                await warm_up(engine)
                # from here on all is for callers
                engine.ledger.recorder = worker.recorder
                worker.loads(engine.usage())
            yield
        finally:
            await engine.stop()
            pulse.cancel()
            if log is not None:
                await asyncio.to_thread(log.stop)
            if traces is not None:
                await traces.stop()
            watch.cancel()

    app = FastAPIOffline(  # its pages from its own files, none from another host
        redoc_url=None,
        title="qkv",
        version=__version__,
        summary="Serves attention: output, weights and timing, from any variant you name.",
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.settings = settings
    runs = Runs(engine, settings, worker.meter)
    shortcuts = Shortcuts(runs)
    inference = infer.Infer(runs, worker.fleet.models, settings, shortcuts)
    made = Native(runs, shortcuts, settings)
    native = (attention.router(made), gradients.router(made))
    for router in (*native, infer.router(inference)):
        app.include_router(router)
    app.include_router(compare.router(runs, settings))
    app.include_router(sweep.router(runs, settings, worker.fleet))
    app.include_router(convert.router(runs, settings))
    app.include_router(variants.router())
    app.include_router(operations.router(engine, worker.fleet))
    app.include_router(playground.router())
    app.include_router(metrics.router(worker.fleet, str(engine.device)))
    app.include_router(v2.router(engine, worker.fleet))
    app.add_exception_handler(QkvError, _known)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unknown)
    app.add_middleware(_Heads)
    app.add_middleware(_Draining, fleet=worker.fleet)
    endpoints = _endpoints(native, inference)
    front: ASGIApp = Front(app, endpoints, _refusal, worker)
    keys = Keys(settings.keys) if settings.keys else None
    if keys is not None:
        app.add_middleware(Guard, keys=keys, refusal=_refusal)  # for who serves it without `front`
        front = Guard(front, keys, _refusal)
    observer = Observer(worker.meter, log, traces)
    app.state.front = Observed(_opened(front, settings.origins), observer)
    app.state.protocol = partial(
        Protocol,
        watch=Watch(settings.read_timeout_s, settings.write_timeout_s),
        refusal=_refusal,
        worker=worker,
        shortcuts=shortcuts,
        round=Round(),
        # on a single CPU it would be in its caller's way
        poll=BusyPoll(worker, settings.busy_poll_us / 1e6 if usable_cpus() > 1 else 0.0),
        door=engine.door,
        keys=keys,
        observer=observer,
    )
    _describe(app, is_guarded=keys is not None)
    return app


def _opened(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """An application that the pages of these origins may ask.

    Outside of all else: browsers ask without a key whether they may ask with one. What is answered
    without ASGI was never asked by a page, for those say `Origin`, which is not plain.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=(
            *("ETag", "Inference-Header-Content-Length", "Retry-After", "Server-Timing"),
            "X-Request-ID",
        ),
    )


async def _watch(engine: Engine | Remote, worker: Worker) -> None:
    """Says that this process takes no requests any more, should its device fail for good."""
    await engine.broken.wait()
    worker.ready(False)


def _endpoints(native: Iterable[APIRouter], inference: infer.Infer) -> dict[str, Endpoint]:
    """What runs variants, by path."""
    routes = [route for router in native for route in router.routes]
    found: dict[str, Endpoint] = {r.path: r.endpoint for r in routes if isinstance(r, APIRoute)}
    for name in catalogue.variants():
        found[f"/v2/models/{name}/infer"] = partial(inference, model=name)
    return found


def _new_engine(settings: Settings, worker: Worker) -> Engine:
    """An engine in this process.

    Raises:
        ValueError: its device is not there.
    """
    return Engine(
        pick_device(settings.device),
        max_batch=settings.max_batch,
        threads=settings.threads,
        most=most_of(settings),
        spare=worker.spare,
        on_busy=worker.busy,
    )


def most_of(settings: Settings) -> Load:
    """What may wait in one process."""
    return Load(settings.max_queue, settings.max_queue_bytes, settings.max_queue_flops)


def new_device_process(
    settings: Settings, worker: Worker, arena: Arena, mailbox: socket.socket, leash: int
) -> DeviceProcess:
    """The process that has the device for all workers: its engine is the only one.

    Raises:
        ValueError: its device is not there.
    """
    engine = _new_engine(settings, worker)
    return DeviceProcess(engine, worker, arena, limits_of(settings), mailbox, leash)


def new_fleet(settings: Settings, workers: int, *, device_process: bool = False) -> Fleet:
    """What so many workers share, and the process that has their device where there is one; made
    before any is forked."""
    return Fleet(
        workers,
        settings.stuck_s,
        settings.stuck_device_s,
        models=tuple(catalogue.variants()),
        most_together=settings.max_batch or GPU_BATCH,
        device_process=device_process,
    )


class _Heads:
    """Whatever answers GET answers HEAD, whose answer the server leaves the body out of; pure
    ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        return await self._app(scope, receive, send)


class _Draining:
    """Refuses what comes once the service ends, and asks callers to close; pure ASGI.

    What has been accepted before goes on: only its connection is not kept for another request.
    """

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_answered = False

        async def closing(message: Event) -> None:
            nonlocal is_answered
            is_answered = True
            if message["type"] == "http.response.start" and self._fleet.draining:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if not self._fleet.draining or scope["path"] in _STILL_ANSWERED:
            try:
                return await self._app(scope, receive, closing)
            except asyncio.CancelledError:  # time is over, and the body has still not come
                if is_answered:
                    raise
        refusal = _refusal(NotNow("the service is stopping", retry_after=5), scope["path"])
        return await refusal(scope, receive, closing)


def _describe(app: FastAPI, is_guarded: bool) -> None:
    """Has the OpenAPI document say what FastAPI cannot know."""
    openapi.prepare()
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            openapi.complete(made(), is_guarded)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's own way to extend it


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, QkvError)
    return _refusal(error, request.url.path)


def _refusal(error: QkvError, path: str) -> Response:
    """An error as the protocol of the path writes it."""
    fails(error)
    if path == "/v2" or path.startswith("/v2/"):
        return v2.refusal(error)
    return Response(
        json.dump(error.problem()),
        status_code=error.status,
        media_type=json.PROBLEM_TYPE,
        headers=error.headers(),
    )


async def _http(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = set((error.headers or {}).get("Allow", "").split(", "))
        allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
        fault: QkvError = MethodNotAllowed(f"{request.method} is not allowed here", allow=allow)
    else:
        fault = NotFound(f"no {request.url.path[:200]} here; /docs says what there is")
    return await _known(request, fault)


async def _unknown(request: Request, error: Exception) -> Response:
    _log.error("a request to %r failed (%s)", request.url.path, request_id(), exc_info=error)
    return await _known(request, Internal("this is a fault of the service, and is logged"))
