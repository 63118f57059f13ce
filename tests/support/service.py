"""A service on a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import uvicorn
from fastapi import FastAPI

from qkv.api.app import Runtime, create_app
from qkv.engine.engine import Engine
from qkv.server.worker import new_uvicorn_config
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
        timeouts: its connection timeouts.
        loop: its event loop.
        http: client for one thread.
    """

    url: str
    app: FastAPI
    runtime: Runtime
    engine: Engine
    timeouts: Any
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


class _UvicornServer(uvicorn.Server):
    """A server that remembers its event loop."""

    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


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
    config = new_uvicorn_config(app)
    server = _UvicornServer(config)
    runtime, protocol = app.state.runtime, cast("Any", config.http)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listening],), name="server")
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started
            with httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as http:
                timeouts = protocol.keywords["timeouts"]
                yield Server(url, app, runtime, runtime.engine, timeouts, server.loop, http)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
