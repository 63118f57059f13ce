"""One request and its response on a connection, as an ASGI application receives and sends them.

`LimitedHttpProtocol` creates a `RequestCycle` for each request, in place of uvicorn's: head and
body of a short response leave in one write, and the parts of a body are not joined in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

__all__ = ["RequestCycle", "encode_head"]

_log = logging.getLogger("uvicorn.error")

_Header = tuple[bytes, bytes]
_JOINED_BYTES: Final = 1 << 16  # a body is copied behind its head sooner than sent by itself
_FAILURE: Final = b"Internal Server Error"
_FAILURE_HEADERS: Final = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(_FAILURE)),
    (b"connection", b"close"),
)


class RequestCycle:
    """One request and its response.

    Args:
        scope: of the request.
        transport: of the connection.
        flow: pauses reading and writing.
        default_headers: of every response.
        keep_alive: the connection stays open after the response.
        is_last: True at the start of the response if the connection must close after it anyway.
        expects_continue: the client waits for 100 Continue before it sends the body.
        on_response: called once the response is complete.
        close: closes the connection after a response without keep-alive.

    Attributes:
        chunks: the parts of the body that have been received and not read.
        chunk_bytes: their size.
        more_body: the body is not complete.
        disconnected: the client has disconnected, or its request failed.
        response_started, response_complete: states of the response.
        keep_alive: as the argument.
    """

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: Sequence[_Header],
        *,
        keep_alive: bool,
        is_last: Callable[[], bool],
        expects_continue: bool,
        on_response: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self.scope, self._transport, self._flow = scope, transport, flow
        self._default_headers, self._on_response, self._close = default_headers, on_response, close
        self.keep_alive, self._is_last = keep_alive, is_last
        self._expects_continue = expects_continue
        self.chunks: list[bytes] = []
        self.chunk_bytes = 0
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self._has_news = False
        self._news: asyncio.Event | None = None  # while the application waits
        self._on_disconnect: Callable[[], object] | None = None
        self._head: bytes | None = None  # not written yet
        self._is_chunked = False
        self._missing_bytes = 0  # of the body of the response

    def add_chunk(self, chunk: bytes) -> None:
        """Adds a received part of the body."""
        self.chunks.append(chunk)
        self.chunk_bytes += len(chunk)
        self.wake()

    def complete_body(self) -> None:
        """Ends the body."""
        self.more_body = False
        self.wake()

    def disconnect(self) -> None:
        """Tells the application that its client is gone."""
        self.disconnected = True
        self.wake()
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Sets what this calls when the client disconnects; None: it calls nothing."""
        self._on_disconnect = callback
        if callback is not None:
            self._flow.resume_reading()  # else no disconnect is seen
            if self.disconnected:
                callback()

    def wake(self) -> None:
        """Wakes the application, if it waits in `receive`."""
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def take_chunks(self) -> list[bytes]:
        """Returns the received parts of the body; the application has read them."""
        chunks, self.chunks, self.chunk_bytes = self.chunks, [], 0
        return chunks

    async def run(self, app: ASGIApp) -> None:
        """Runs the application for this request; responds 500 if it fails before its response."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            await self._fail("Exception in ASGI application\n", error)
        else:
            if not self.response_complete and not self.disconnected:
                await self._fail("ASGI callable returned without completing response.", None)

    async def _fail(self, message: str, error: BaseException | None) -> None:
        _log.error(message, exc_info=error)
        if self.response_started:
            self._close()
            return
        start = {"type": "http.response.start", "status": 500, "headers": _FAILURE_HEADERS}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": _FAILURE})

    async def receive(self) -> Message:
        """Returns the next part of the body, or the disconnect; the ASGI callable."""
        if self._expects_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            if not self._has_news:
                if self._news is None:
                    self._news = asyncio.Event()
                self._news.clear()
                await self._news.wait()
            self._has_news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        chunks = self.take_chunks()
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Sends the head of the response, or a part of its body; the ASGI callable.

        Raises:
            RuntimeError: the message is not the next one, or the body has another length.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"Unexpected ASGI message {kind!r}")

    def _start(self, status: int, headers: Iterable[_Header]) -> None:
        self.response_started, self._expects_continue = True, False
        named = dict(headers)
        if b"close" in named.get(b"connection", b"").lower():
            self.keep_alive = False
        elif not self.keep_alive or self._is_last():
            self.keep_alive = False
            headers = [*headers, (b"connection", b"close")]
        has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if (length := named.get(b"content-length")) is not None:
            self._missing_bytes = int(length) if has_body else 0
        elif has_body:
            self._is_chunked = True
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._head = encode_head(status, [*self._default_headers, *headers])
        if self._is_chunked:  # the first part may take time
            self._transport.write(self._head)
            self._head = None

    def _send_body(self, body: bytes | memoryview, more_body: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            parts = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            self._transport.write(b"".join(parts if more_body else [*parts, b"0\r\n\r\n"]))
        else:
            self._missing_bytes -= len(body)
            if self._missing_bytes < 0 or (self._missing_bytes and not more_body):
                raise RuntimeError("the body has not the length of Content-Length")
            if self._head is not None and len(body) <= _JOINED_BYTES:
                body = b"".join((self._head, body))
            elif self._head is not None:
                self._transport.write(self._head)
            self._head = None
            self._transport.write(body)
        if not more_body:
            self.response_complete = True
            self.wake()
            if not self.keep_alive:
                self._close()
            self._on_response()


def encode_head(status: int, headers: Sequence[_Header]) -> bytes:
    """Returns the head of a response.

    Raises:
        RuntimeError: a header has a line break.
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") + lines.count(b"\r") != 2 * len(headers):
        raise RuntimeError("Invalid HTTP header")
    return b"%b%b\r\n" % (STATUS_LINE[status], lines)
