"""Worker process: uvicorn, with the API on the socket that all workers share.

`run_worker` runs a forked worker. `new_uvicorn_config` configures any uvicorn server of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import uvicorn
from fastapi import FastAPI

from qkv.api.app import Runtime, create_app
from qkv.api.error_responses import error_response
from qkv.engine.job_executor import JobExecutor
from qkv.server.acceptor import Acceptor
from qkv.server.api_protocol import ApiProtocol
from qkv.server.connection_timeouts import ConnectionTimeouts
from qkv.settings import Settings
from qkv.telemetry.worker_state import WorkerState

__all__ = ["DRAIN_ACCEPT_S", "DRAIN_IDLE_S", "WorkerServer", "new_uvicorn_config", "run_worker"]

DRAIN_ACCEPT_S: Final = 0.3
"""Seconds after the start of the drain in which new connections are accepted."""

DRAIN_IDLE_S: Final = 0.7
"""Seconds after that in which idle connections stay open.

A client that sends a request while its connection closes gets no response. A client that sends one
every second gets one with `Connection: close` instead.
"""

_POLL_S: Final = 0.1


def run_worker(
    settings: Settings,
    listening: socket.socket,
    worker: WorkerState,
    remote: JobExecutor | None,
    parent_alive_fd: int,
) -> int:
    """Runs a worker process from fork to exit.

    Args:
        settings: settings of the service.
        listening: socket that all workers accept from.
        worker: this process's part of the shared state.
        remote: engine that uses the device process; None: the worker creates an engine.
        parent_alive_fd: reads end of file once the supervisor has exited.

    Returns:
        The exit status: 0 after a clean stop.
    """
    app = create_app(settings, worker, remote, listening.getsockname()[:2])
    failed: asyncio.Event = app.state.runtime.engine.failed
    server = WorkerServer(new_uvicorn_config(app), worker, parent_alive_fd, failed)
    with torch.inference_mode():  # once, instead of for each small job on the event loop
        server.run(sockets=[listening])
    return 0 if server.started and not failed.is_set() else 1


def new_uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """Returns uvicorn's configuration for an application of `create_app`."""
    runtime: Runtime = app.state.runtime
    return uvicorn.Config(
        app.state.asgi,
        loop="uvloop" if sys.platform != "win32" else "auto",
        http=_new_protocol_factory(runtime),  # type: ignore[arg-type]  # uvicorn calls it
        lifespan="on",
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_graceful_shutdown=runtime.settings.drain_s,
    )


def _new_protocol_factory(runtime: Runtime) -> Callable[..., ApiProtocol]:
    """Returns the factory of connection protocols."""
    settings, shared_state = runtime.settings, runtime.worker.shared_state
    return partial(
        ApiProtocol,
        timeouts=ConnectionTimeouts(settings.read_timeout_s, settings.write_timeout_s),
        error_response=error_response,
        is_draining=lambda: shared_state.is_draining,
        observer=runtime.observer,
    )


class WorkerServer(uvicorn.Server):
    """uvicorn in a worker: marks it ready, and keeps idle connections for a moment before it stops.

    Args:
        config: as `new_uvicorn_config` returns it.
        worker: this process's part of the shared state.
        parent_alive_fd: reads end of file once the supervisor has exited.
        failed: set once the device has failed permanently; then the server exits.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        worker: WorkerState,
        parent_alive_fd: int,
        failed: asyncio.Event,
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._parent_alive_fd = parent_alive_fd
        self._failed = failed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # the acceptor accepts connections, not uvicorn
        assert sockets is not None
        (listening,) = sockets
        connections = self.server_state.connections
        self._acceptor = Acceptor(
            listening, self._worker, self._new_protocol, lambda: len(connections)
        )
        self._acceptor.open()
        asyncio.get_running_loop().add_reader(self._parent_alive_fd, self._on_supervisor_exit)
        self._worker.set_ready(True)

    async def on_tick(self, counter: int) -> bool:
        """Returns True if the server must exit: by uvicorn, or if the device has failed."""
        return self._failed.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.set_ready(False)
        for _ in range(
            round(DRAIN_IDLE_S / _POLL_S)
        ):  # then uvicorn closes idle connections at once
            await asyncio.sleep(_POLL_S)
            if self._failed.is_set() or not self.server_state.connections:
                break
        self._acceptor.close()
        await super().shutdown(sockets)

    def _new_protocol(self) -> asyncio.Protocol:
        new_protocol: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = new_protocol(
            self.config, self.server_state, self.lifespan.state
        )
        return protocol

    def _on_supervisor_exit(self) -> None:
        """Stops this worker: without the supervisor nothing would stop or restart it."""
        asyncio.get_running_loop().remove_reader(self._parent_alive_fd)
        self._worker.shared_state.drain()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGTERM. uvicorn would raise the signal again after a clean stop, so that the
        worker would exit as if it had failed."""
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
