"""A service on a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvloop
from fastapi import FastAPI

from qkv.api.app import Runtime, create_app, running
from qkv.engine.engine import Engine
from qkv.server.http_connection import HttpConnection
from qkv.server.http_server import HttpServer
from qkv.server.worker import new_http_server
from qkv.settings import Settings
from support.engines import hold, hold_device_thread
from support.processes import TIMEOUT_S, wait_until


@dataclass(frozen=True)
class Server:
    """A service on a real socket of 127.0.0.1.

    Attributes:
        url: its base URL.
        app: the FastAPI application.
        runtime: state shared by its requests.
        engine: its engine.
        http_server: has its connections.
        loop: its event loop.
        http: client for one thread.
    """

    url: str
    app: FastAPI
    runtime: Runtime
    engine: Engine
    http_server: HttpServer
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a plain socket."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    @property
    def queued_count(self) -> int:
        """Number of jobs in the queue."""
        return self.engine.queued.requests

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the engine from running any job, so that a test can fill the queue."""
        return hold(self.engine)

    def hold_device_thread(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the device thread from taking jobs; small jobs still run on the event loop."""
        return hold_device_thread(self.engine)

    def wait_until_queued(self, count: int) -> None:
        """Waits until `count` jobs are queued."""
        wait_until(lambda: self.queued_count == count)


class _ServerThread:
    """Serves an application in a thread of this process.

    Attributes:
        http_server, loop: set once it has started.
    """

    http_server: HttpServer
    loop: asyncio.AbstractEventLoop

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        self._app, self._listening = app, listening
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")

    def start(self) -> None:
        """Returns once it accepts connections."""
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Stops it, as a worker stops."""
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runtime: Runtime = self._app.state.runtime
        self.http_server = new_http_server(self._app)
        async with running(runtime):
            accepting = await self.loop.create_server(
                lambda: HttpConnection(self.http_server), sock=self._listening
            )
            self._started.set()
            await self._stop.wait()
            accepting.close()
            await self.http_server.drain(runtime.settings.drain_s)


@contextlib.contextmanager
def running_server(bound: tuple[str, int] | None = None, **settings: Any) -> Iterator[Server]:
    """Runs a service in a thread of this process.

    Args:
        bound: as for `create_app`.
        **settings: those of `Settings`.
    """
    settings.setdefault("device", "cpu")
    settings.setdefault("threads", 1)
    app = create_app(Settings(**settings), bound=bound)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = _ServerThread(app, listening)
        thread.start()
        runtime = app.state.runtime
        try:
            with httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as http:
                yield Server(
                    url, app, runtime, runtime.engine, thread.http_server, thread.loop, http
                )
        finally:
            thread.stop()
