"""One request and its response on a connection, as an ASGI application receives and sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Scope

from qkv.api.server_request import SERVER_REQUEST, Header, ServerRequest

__all__ = ["HttpRequest", "RequestConnection", "encode_head"]

_log = logging.getLogger(__name__)

_JOINED_BYTES: Final = 1 << 16  # a body is copied behind its head sooner than sent by itself
_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_FAILURE: Final = b"Internal Server Error"
_FAILURE_HEADERS: Final = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(_FAILURE)),
    (b"connection", b"close"),
)


class RequestConnection(Protocol):
    """The part of a connection that a request needs.

    Attributes:
        transport: writes the response.
        is_write_paused: the client does not read what was written.
    """

    transport: asyncio.Transport

    @property
    def is_write_paused(self) -> bool: ...
    @property
    def date(self) -> bytes:
        """The header Date with its end of line."""

    @property
    def is_last_request(self) -> bool:
        """True if the connection must close after the response anyway."""

    @property
    def is_only_request(self) -> bool:
        """True if no other request of this process is in progress."""

    def resume_reading(self) -> None:
        """Reads from the socket again."""

    async def receive_into(self, buffer: memoryview) -> None:
        """Receives the rest of the body into a buffer; returns early after a disconnect."""

    async def until_writable(self) -> None:
        """Waits until the client has read most of what was written."""

    def on_response_complete(self) -> None:
        """Continues with the next request."""

    def close_after_response(self) -> None:
        """Closes the connection: its response was the last."""


class HttpRequest(ServerRequest):
    """One request and its response.

    Head and body of a short response leave in one write, and the parts of a body are not joined
    before the application takes them.

    Args:
        connection: the connection.
        scope: of the request, as ASGI has it.
        keep_alive: the connection stays open after the response.

    Attributes:
        received_bytes: bytes of the body that have been received and not read.
        is_received: the body is complete.
        response_started, response_complete: states of the response.
        keep_alive: as the argument.
    """

    def __init__(
        self,
        connection: RequestConnection,
        scope: Scope,
        keep_alive: bool,
    ) -> None:
        super().__init__(scope["headers"])
        self._connection, self._scope, self.keep_alive = connection, scope, keep_alive
        self._expects_continue = self.headers.get(b"expect", b"").lower() == b"100-continue"
        self._chunks: list[bytes] = []
        self.received_bytes = 0
        self.is_received = self._is_read = False
        self.response_started = self.response_complete = False
        self._news: asyncio.Event | None = None  # while the application waits
        self._head: bytes | None = None  # not written yet
        self._is_streamed = self._is_chunked = False  # a response of unknown length
        self._missing_bytes = 0  # of the body of the response

    # the body of the request

    def add_chunk(self, chunk: bytes) -> None:
        """Adds a received part of the body."""
        self._chunks.append(chunk)
        self.received_bytes += len(chunk)
        self._wake()

    def complete_body(self) -> None:
        """Ends the body."""
        self.is_received = True
        self._wake()

    async def receive(self) -> Message:
        """Returns the next part of the body, or the disconnect; the ASGI callable."""
        while not (self._chunks or self.is_received > self._is_read or self._is_over):
            await self._wait()
        if self._is_over:
            return {"type": "http.disconnect"}
        chunks = self._take_chunks()
        self._is_read = self.is_received
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return {"type": "http.request", "body": body, "more_body": not self.is_received}

    async def peek(self, size: int) -> bytes:
        """Waits for the first bytes of the body, and returns them without reading them."""
        while self.received_bytes < size and not self.is_received and not self._is_over:
            await self._wait()
        chunks = self._chunks
        return chunks[0][:size] if len(chunks) == 1 else b"".join(chunks)[:size]

    async def read_into(self, buffer: memoryview) -> bool:
        """Fills a buffer that is as long as the body; returns False if the client disconnects."""
        size = 0
        for chunk in self._take_chunks():
            buffer[size : size + len(chunk)] = chunk
            size += len(chunk)
        if size < len(buffer) and not self.disconnected:
            await self._connection.receive_into(buffer[size:])
        self._is_read = True
        return not self.disconnected

    @property
    def is_alone(self) -> bool:
        """True if no other request of this process is in progress."""
        return self._connection.is_only_request

    def disconnect(self) -> None:
        """Tells the application that its client is gone."""
        super().disconnect()
        self._wake()

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Sets what this calls when the client disconnects; None: it calls nothing."""
        if callback is not None:
            self._connection.resume_reading()  # else no disconnect is seen
        super().call_on_disconnect(callback)

    @property
    def _is_over(self) -> bool:
        return self.disconnected or self.response_complete

    def _take_chunks(self) -> list[bytes]:
        chunks, self._chunks, self.received_bytes = self._chunks, [], 0
        return chunks

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    async def _wait(self) -> None:
        """Waits for a part of the body, or its end."""
        if self._expects_continue and not self._connection.transport.is_closing():
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        self._connection.resume_reading()
        if self._news is None:
            self._news = asyncio.Event()
        self._news.clear()
        await self._news.wait()

    # the response

    async def run(self, app: ASGIApp) -> None:
        """Runs the application for this request; responds 500 if it fails before its response."""
        self._scope[SERVER_REQUEST] = self
        try:
            await app(self._scope, self.receive, self.send)
        except BaseException as error:
            await self._fail("the application failed", error)
        else:
            if not self._is_over:
                await self._fail("the application returned without a response", None)
        finally:
            del self._scope[SERVER_REQUEST]  # scope and request would keep each other alive

    async def _fail(self, message: str, error: BaseException | None) -> None:
        _log.error(message, exc_info=error)
        if self.response_started:
            self._connection.close_after_response()
            return
        start = {"type": "http.response.start", "status": 500, "headers": _FAILURE_HEADERS}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": _FAILURE})

    async def send(self, message: Message) -> None:
        """Sends the head of the response, or a part of its body; the ASGI callable.

        Raises:
            RuntimeError: the message is not the next one, or the body has another length.
        """
        if self._connection.is_write_paused and not self.disconnected:
            await self._connection.until_writable()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _start(self, status: int, headers: Iterable[Header]) -> None:
        self.response_started, self._expects_continue = True, False
        named = dict(headers)
        if b"close" in named.get(b"connection", b"").lower():
            self.keep_alive = False
        elif not self.keep_alive or self._connection.is_last_request:
            self.keep_alive = False
            headers = [*headers, (b"connection", b"close")]
        has_body = self._scope["method"] != "HEAD" and status not in (204, 304)
        if (length := named.get(b"content-length")) is not None:
            self._missing_bytes = int(length) if has_body else 0
        elif has_body:
            self._is_streamed = True
            self._is_chunked = self._scope["http_version"] == "1.1"  # before, the end is the close
            if self._is_chunked:
                headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._head = encode_head(status, headers, self._connection.date)
        if self._is_streamed:  # the first part may take time
            self._write(self._take_head())

    def _send_body(self, body: bytes | memoryview, more_body: bool) -> None:
        if self._scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            parts = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            self._write(b"".join(parts if more_body else [*parts, b"0\r\n\r\n"]))
        elif self._is_streamed:
            self._write(body)
        else:
            self._missing_bytes -= len(body)
            if self._missing_bytes < 0 or (self._missing_bytes and not more_body):
                raise RuntimeError("the body has not the length of Content-Length")
            if self._head is not None and len(body) <= _JOINED_BYTES:
                body = b"".join((self._take_head(), body))
            elif self._head is not None:
                self._write(self._take_head())
            self._write(body)
        if not more_body:
            self.response_complete = True
            self._wake()
            if not self.keep_alive:
                self._connection.close_after_response()
            self._connection.on_response_complete()

    def _write(self, data: bytes | memoryview) -> None:
        self._connection.transport.write(data)

    def _take_head(self) -> bytes:
        head, self._head = self._head, None
        assert head is not None
        return head


def encode_head(status: int, headers: Iterable[Header], date: bytes = b"") -> bytes:
    """Returns the head of a response.

    Args:
        status: its status.
        headers: names and values.
        date: the header Date with its end of line.

    Raises:
        RuntimeError: a header has a line break.
    """
    lines = [b"%b: %b\r\n" % header for header in headers]
    text = b"".join(lines)
    if text.count(b"\n") + text.count(b"\r") != 2 * len(lines):
        raise RuntimeError("a header has a line break")
    return b"%b%b%b\r\n" % (_STATUS_LINES[status], date, text)
