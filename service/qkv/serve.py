"""Runs the application with uvicorn, and says where it is."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import click
import uvicorn

from qkv.app import create_app
from qkv.settings import Settings

__all__ = ["serve"]

_TRY = """\
qkv serves on {url} ({device}); Ctrl-C stops it. Try:
curl {url}/v1/attention/softmax --json \
'{{"inputs": {{"query": [[1,0],[0,1]], "key": [[1,0],[0,1]], "value": [[1,2],[3,4]]}}}}'"""


def serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM; then answers what it has accepted and returns."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop" if sys.platform != "win32" else "auto",
        http="httptools",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    _Server(config, device=str(app.state.engine.device)).run()


class _Server(uvicorn.Server):
    """uvicorn, saying where it listens once it does, and ending with status 0 when told to."""

    def __init__(self, config: uvicorn.Config, device: str) -> None:
        super().__init__(config)
        self._device = device

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            click.echo(_TRY.format(url=f"http://{host}:{port}", device=self._device), err=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again after a clean stop, which then ends with a failure."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {s: signal.signal(s, self.handle_exit) for s in signals}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
