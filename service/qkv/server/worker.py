"""A worker process: uvicorn serves the API on the socket that all workers share."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import uvicorn
import uvloop
from starlette.types import ASGIApp

from qkv.api.app import Runtime, create_app, new_metrics_app
from qkv.api_keys import ValidApiKeys
from qkv.engine.job_executor import JobExecutor
from qkv.engine.thread_priority import use_yielding_threads
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.server.acceptor import Acceptor
from qkv.server.http_protocol import HttpLimits, HttpProtocol
from qkv.settings import Settings
from qkv.telemetry.worker_state import WorkerState

DRAIN_ACCEPT_S: Final = 0.3
"""Seconds after the start of the drain in which new connections are accepted."""

DRAIN_IDLE_S: Final = 0.7
"""Seconds after that in which idle connections stay open.

A client that sends a request while its connection closes gets no response. A client that sends one
every second gets one with `Connection: close` instead.
"""

_CANCEL_S: Final = 2.0  # for the responses of requests that are cancelled
_POLL_INTERVAL_S: Final = 0.05


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
    app = create_app(settings, worker, remote, layers, api_keys)
    gc.collect()
    gc.freeze()  # thousands of objects of models and routes, which no collection need visit
    runtime: Runtime = app.state.runtime
    server = _WorkerServer(app, runtime, sockets, parent_alive_fd)
    # uvicorn's handler of the signal follows, and raises it again at its end
    signal.signal(signal.SIGTERM, server.stop)
    with (
        torch.inference_mode(),  # once, instead of for each small job on the event loop
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(server.serve())
    return 1 if runtime.engine.failed.is_set() else 0


def new_config(app: ASGIApp, runtime: Runtime) -> uvicorn.Config:
    """Returns the configuration of a server of uvicorn for an application of this process."""
    settings, state = runtime.settings, runtime.worker.shared_state
    limits = HttpLimits(settings.read_timeout_s, lambda: state.is_draining)
    protocol: Any = partial(HttpProtocol, limits=limits)  # uvicorn only calls it
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,  # of this process
        log_level="warning",
        access_log=False,  # the service has a log of its own
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s,
    )


class _WorkerServer(uvicorn.Server):
    """uvicorn in one of several workers: accepts in turn with the others, and drains in steps.

    Args:
        app: serves the API.
        runtime: of the application.
        sockets, parent_alive_fd: as for `run_worker`.
    """

    def __init__(
        self,
        app: ASGIApp,
        runtime: Runtime,
        sockets: Sequence[socket.socket],
        parent_alive_fd: int,
    ) -> None:
        super().__init__(new_config(app, runtime))
        self._runtime, self._parent_alive_fd = runtime, parent_alive_fd
        self._sockets, self._acceptors = sockets, list[Acceptor]()

    def stop(self, *_: object) -> None:
        """Makes the server drain."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then accepts connections."""
        await super().startup(sockets=[])
        loop, runtime = asyncio.get_running_loop(), self._runtime
        use_yielding_threads()
        if runtime.api_keys is not None:
            loop.add_signal_handler(signal.SIGHUP, runtime.api_keys.reload)
            runtime.api_keys.reload()  # a signal before this line was ignored
        loop.add_reader(self._parent_alive_fd, self._on_supervisor_exit)
        self._failure = loop.create_task(self._stop_on_failure())
        configs = [self.config, new_config(new_metrics_app(runtime), runtime)]
        # no configuration for a second socket that does not exist
        for listening, config in zip(self._sockets, configs, strict=False):
            acceptor = Acceptor(
                listening,
                runtime.worker,
                self._protocol_of(config),
                lambda: len(self.server_state.connections),
                self._close_longest_idle,
            )
            acceptor.open()
            self._acceptors.append(acceptor)
        runtime.worker.set_ready(True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the requests that arrive for a while, then closes all connections."""
        self._runtime.worker.set_ready(False)
        self._failure.cancel()
        if not self._runtime.engine.failed.is_set():
            await self._until_idle(DRAIN_IDLE_S)
        for acceptor in self._acceptors:
            acceptor.close()
        for listening in self._sockets:  # in the last worker: the system refuses new connections
            listening.close()
        await self._end_connections()
        await super().shutdown()

    def _protocol_of(self, config: uvicorn.Config) -> Callable[[], asyncio.BaseProtocol]:
        """Returns what creates the protocol of a connection, as uvicorn does."""
        if not config.loaded:
            config.load()
        new_protocol: Any = config.http_protocol_class
        return partial(new_protocol, config=config, server_state=self.server_state)

    def _close_longest_idle(self) -> bool:
        """Closes the connection without a request for longest; returns False if there is none."""
        every: Any = self.server_state.connections
        idle: list[HttpProtocol] = [connection for connection in every if connection.is_idle]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).transport.close()
        return bool(idle)

    async def _end_connections(self) -> None:
        """Waits for the last requests, then cancels them. uvicorn, which would log that as an error
        and not wait for their responses, finds no connection."""
        state = self.server_state
        connections: Any = state.connections
        for connection in list(connections):
            connection.shutdown()
        await self._until_idle(self._runtime.settings.drain_s)
        for task in state.tasks:
            task.cancel()
        await self._until_idle(_CANCEL_S)
        for connection in list(connections):
            connection.transport.abort()

    def _on_supervisor_exit(self) -> None:  # nothing would stop or restart this worker
        asyncio.get_running_loop().remove_reader(self._parent_alive_fd)
        self._runtime.worker.shared_state.drain()
        self.stop()

    async def _stop_on_failure(self) -> None:
        await self._runtime.engine.failed.wait()
        self.stop()

    async def _until_idle(self, seconds: float) -> None:
        """Waits until no connection is open, at most these seconds."""
        polls = round(seconds / _POLL_INTERVAL_S)
        while self.server_state.connections and polls:
            polls -= 1
            await self.on_tick(0)  # the date of the responses, which stands still otherwise
            await asyncio.sleep(_POLL_INTERVAL_S)
