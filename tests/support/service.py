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
import uvicorn
import uvloop
from fastapi import FastAPI

from qkv.api.app import Runtime, create_app
from qkv.engine.engine import Engine
from qkv.server import listener
from qkv.server.worker import new_config
from qkv.settings import Settings
from support.processes import TIMEOUT_S, wait_until


@dataclass(frozen=True)
class Server:
    """A service on a real socket of 127.0.0.1.

    Attributes:
        url: its base URL.
        app: the FastAPI application.
        runtime: state shared by its requests.
        engine: its engine.
        uvicorn: its server.
        loop: its event loop.
        http: client for one thread.
    """

    url: str
    app: FastAPI
    runtime: Runtime
    engine: Engine
    uvicorn: uvicorn.Server
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
        return self.engine.paused()

    def hold_device_thread(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the device thread from taking jobs; small jobs still run on the event loop."""
        return self.engine.paused(small_jobs=False)

    @property
    def clients(self) -> list[tuple[str, int]]:
        """The addresses of the clients whose connections are open."""
        connections: Any = list(self.uvicorn.server_state.connections)
        return [connection.client for connection in connections]

    def wait_until_queued(self, count: int) -> None:
        """Waits until `count` jobs are queued."""
        wait_until(lambda: self.queued_count == count)


class _ServerThread:
    """Serves an application in a thread of this process.

    Attributes:
        uvicorn: the server.
        loop: set once it has started.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        self._listening = listening
        self.uvicorn = uvicorn.Server(new_config(app, app.state.runtime))
        self._thread = threading.Thread(target=self._run, name="server")

    def start(self) -> None:
        """Returns once it accepts connections."""
        self._thread.start()
        wait_until(lambda: self.uvicorn.started)

    def stop(self) -> None:
        """Stops it, as a worker stops."""
        self.uvicorn.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self.uvicorn.serve([self._listening]))


@contextlib.contextmanager
def running_server(**settings: Any) -> Iterator[Server]:
    """Runs a service in a thread of this process, with these settings."""
    settings.setdefault("device", "cpu")
    settings.setdefault("threads", 1)
    app = create_app(Settings(**settings))
    runtime: Runtime = app.state.runtime
    with listener.listen("127.0.0.1", 0, runtime.settings.write_timeout_s) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = _ServerThread(app, listening)
        thread.start()
        try:
            with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
                engine = runtime.engine
                assert isinstance(engine, Engine)
                yield Server(url, app, runtime, engine, thread.uvicorn, thread.loop, http)
        finally:
            thread.stop()
