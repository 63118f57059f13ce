"""HTTP/1.1 as uvicorn speaks it, with a shorter way for what can be answered at once."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from qkv.fleet import Worker
from qkv.routes.front import ACCEPTED
from qkv.routes.shortcuts import Asked, Reply, Shortcuts

__all__ = ["Protocol"]


class Protocol(HttpToolsProtocol):
    """One connection.

    A request that the shortcuts know is kept from uvicorn until its last byte is there. They
    answer it then, or uvicorn goes on with all of it as if it had just come: a task, an ASGI
    application and two queues for each request take longer than a small attention.

    Args:
        config, server_state, app_state, _loop: as uvicorn's protocols take them.
        worker: counts requests, and says when the service ends; then there are no short ways.
        shortcuts: what can be answered at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        worker: Worker,
        shortcuts: Shortcuts,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._worker, self._shortcuts = worker, shortcuts
        self._asked: Asked | None = None  # what came in short
        self._chunks: list[bytes] = []

    def on_headers_complete(self) -> None:
        if self._is_free() and self.parser.get_method() == b"POST":
            asked = Asked.of(self.url, self.headers)
            if self._shortcuts.knows(asked) and self.parser.get_http_version() == "1.1":
                self._asked = asked
                self._worker.asks(1)
                return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._asked is not None:
            self._chunks.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asked is not None:
            ends = self._worker.fleet.draining  # then more is to be said than the answer
            reply = None if ends else self._shortcuts.answer(self._asked, self._chunks)
            if reply is not None:
                self._forget()
                self._write(reply)
                return
            self._take_long_way()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._asked is not None:
            self._forget()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn would close a connection whose request it does not know."""
        if self._asked is not None:
            self._take_long_way()
        super().shutdown()

    def _is_free(self) -> bool:
        """Whether nothing on this connection is being answered, or waits to be read by its caller,
        and the service goes on."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.flow.write_paused and not self._worker.fleet.draining

    def _take_long_way(self) -> None:
        chunks = self._chunks
        self._forget()
        self.scope["state"][ACCEPTED] = True
        super().on_headers_complete()
        for chunk in chunks:
            super().on_body(chunk)

    def _forget(self) -> None:
        self._asked, self._chunks = None, []
        self._worker.asks(-1)

    def _write(self, reply: Reply) -> None:
        defaults = b"".join(
            [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        )
        length = b"content-length: %d\r\n\r\n" % sum(map(len, reply.body))
        self.transport.write(
            b"".join((STATUS_LINE[200], defaults, reply.lines, length, *reply.body))
        )
        self.on_response_complete()
