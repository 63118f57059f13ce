"""A worker process: serves the API on the socket that all workers share, until it must stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import torch
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from qkv.api.app import Runtime, create_app, new_metrics_asgi, running
from qkv.api.error_responses import error_response
from qkv.api_keys import ValidApiKeys
from qkv.engine.job_executor import JobExecutor
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.server.acceptor import Acceptor
from qkv.server.http_connection import HttpConnection
from qkv.server.http_server import HttpServer
from qkv.settings import Settings
from qkv.telemetry.worker_state import WorkerState

__all__ = ["DRAIN_ACCEPT_S", "DRAIN_IDLE_S", "new_http_server", "run_worker"]

DRAIN_ACCEPT_S: Final = 0.3
"""Seconds after the start of the drain in which new connections are accepted."""

DRAIN_IDLE_S: Final = 0.7
"""Seconds after that in which idle connections stay open.

A client that sends a request while its connection closes gets no response. A client that sends one
every second gets one with `Connection: close` instead.
"""


def run_worker(
    settings: Settings,
    sockets: Sequence[socket.socket],
    worker: WorkerState,
    remote: JobExecutor | None,
    parent_alive_fd: int,
    layers: LoadedLayers,
    api_keys: ValidApiKeys | None,
) -> int:
    """Runs a worker process from fork to exit.

    Args:
        settings: settings of the service.
        sockets: those that all workers accept from: the service's, and that of metrics if there is
            one. Any worker answers a request for metrics, so that none has to outlive the others.
        worker: this process's part of the shared state.
        remote: engine that uses the device process; None: the worker creates an engine.
        parent_alive_fd: reads end of file once the supervisor has exited.
        layers: that requests may name.
        api_keys: that requests may have; None: they need none.

    Returns:
        The exit status: 0 after a clean stop.
    """
    app = create_app(settings, worker, remote, sockets[0].getsockname()[:2], layers, api_keys)
    with (
        torch.inference_mode(),  # once, instead of for each small job on the event loop
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        is_clean = runner.run(_serve(app, sockets, parent_alive_fd))
    return 0 if is_clean else 1


def new_http_server(app: FastAPI) -> HttpServer:
    """Returns the server of an application of `create_app`."""
    return _new_server(app.state.asgi, app.state.runtime)


def _new_server(asgi: ASGIApp, runtime: Runtime) -> HttpServer:
    settings, shared_state = runtime.settings, runtime.worker.shared_state
    return HttpServer(
        asgi,
        runtime.observer,
        error_response,
        is_draining=lambda: shared_state.is_draining,
        read_timeout_s=settings.read_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )


async def _serve(app: FastAPI, sockets: Sequence[socket.socket], parent_alive_fd: int) -> bool:
    """Serves until SIGTERM, the end of the supervisor, or a permanent failure of the device.

    Returns:
        False if the device has failed.
    """
    runtime: Runtime = app.state.runtime
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    failed = runtime.engine.failed

    def on_supervisor_exit() -> None:  # nothing would stop or restart this worker
        loop.remove_reader(parent_alive_fd)
        runtime.worker.shared_state.drain()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if runtime.api_keys is not None:
        loop.add_signal_handler(signal.SIGHUP, runtime.api_keys.reload)
        runtime.api_keys.reload()  # a signal before this line was ignored
    loop.add_reader(parent_alive_fd, on_supervisor_exit)
    server, listening = new_http_server(app), sockets[0]
    async with running(runtime), _serving_metrics(runtime, sockets[1:]) as metrics_servers:
        acceptor = Acceptor(
            listening,
            runtime.worker,
            partial(HttpConnection, server),
            lambda: len(server.connections),
            lambda: any(each.close_longest_idle() for each in (*metrics_servers, server)),
        )
        acceptor.open()
        runtime.worker.set_ready(True)
        await _wait_for_any(stop, failed)
        runtime.worker.set_ready(False)
        if not failed.is_set():
            await server.until_closed(DRAIN_IDLE_S)
        acceptor.close()
        listening.close()  # in the last worker: the system refuses new connections
        await server.drain(runtime.settings.drain_s)
    return not failed.is_set()


@asynccontextmanager
async def _serving_metrics(
    runtime: Runtime, sockets: Sequence[socket.socket]
) -> AsyncGenerator[Sequence[HttpServer]]:
    """Serves metrics on these sockets, without balancing: a scrape is rare and short."""
    loop = asyncio.get_running_loop()
    accepting, servers = [], []
    for listening in sockets:
        server = _new_server(new_metrics_asgi(runtime, listening.getsockname()[:2]), runtime)
        accepting.append(await loop.create_server(partial(HttpConnection, server), sock=listening))
        servers.append(server)
    try:
        yield servers
    finally:
        for each in accepting:
            each.close()
        for server in servers:
            await server.drain(DRAIN_IDLE_S)


async def _wait_for_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
