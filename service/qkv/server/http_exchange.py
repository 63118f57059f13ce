"""One request and its response, as an ASGI application receives and sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final, Protocol

from starlette.types import ASGIApp, Message

from qkv.errors import QkvError

_log = logging.getLogger(__name__)

_JOINED_BYTES: Final = 1 << 16  # a body is copied behind its head sooner than sent by itself
_FEW_CHUNKS: Final = 8
_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_FAILURE: Final = b"Internal Server Error"
_FAILURE_HEADERS: Final = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(_FAILURE)),
    (b"connection", b"close"),
)


class _Connection(Protocol):
    """The part of a connection that an exchange needs."""

    @property
    def transport(self) -> asyncio.Transport:
        """Writes the response."""

    @property
    def is_write_paused(self) -> bool:
        """True if the client does not read what was written."""

    @property
    def date(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response: Date."""

    @property
    def is_last_response(self) -> bool:
        """True if the connection must close after the response anyway."""

    def resume_reading(self) -> None:
        """Reads from the socket again."""

    async def until_writable(self) -> None:
        """Waits until the client has read most of what was written, or is gone."""

    def on_response_complete(self, exchange: Exchange) -> None:
        """Continues with the next request, or closes the connection."""


class Exchange:
    """One request and its response.

    Head and body of a short response leave in one write.

    Args:
        connection: the connection.
        scope: of the request, as ASGI has it.
        keep_alive: the connection stays open after the response.
        expects_continue: the client sends the body after "100 Continue" (RFC 9110, section 10.1.1).

    Attributes:
        keep_alive: as the argument.
        unread_bytes: bytes of the body that have been received and not read.
        response_started, response_complete: states of the response.
    """

    _news: asyncio.Event | None = None  # while the application waits
    _error: QkvError | None = None
    _is_received = _is_read = _is_over = False
    _head: bytes | None = None  # of the response, not written yet
    _is_streamed = _is_chunked = False  # a response of unknown length
    _missing_bytes = 0  # of the body of the response
    unread_bytes = 0
    response_started = response_complete = False

    def __init__(
        self,
        connection: _Connection,
        scope: dict[str, Any],
        keep_alive: bool,
        expects_continue: bool = False,
    ) -> None:
        self._connection, self._scope, self.keep_alive = connection, scope, keep_alive
        self._expects_continue = expects_continue
        self._chunks: list[bytes] = []

    # the request

    def add_chunk(self, chunk: bytes) -> None:
        """Adds a received part of the body."""
        self._chunks.append(chunk)
        self.unread_bytes += len(chunk)
        if self._news is not None:
            self._news.set()

    def complete_body(self) -> None:
        """Ends the body."""
        self._is_received = True
        self._wake()

    def fail(self, error: QkvError) -> None:
        """Ends the body with an error, which the application gets when it reads on."""
        self._error, self.keep_alive = error, False
        self._wake()

    def disconnect(self) -> None:
        """Tells the application that its client is gone."""
        self._is_over = True
        self._wake()

    async def receive(self) -> Message:
        """Returns the next part of the body, or the disconnect; the ASGI callable.

        Raises:
            QkvError: the rest of the body is malformed, too slow or too large.
        """
        while not (self._chunks or self._is_received > self._is_read or self._is_over):
            if self._error is not None:
                raise self._take_error()
            await self._wait()
        if self._is_over:
            return {"type": "http.disconnect"}
        chunks = self._chunks
        # a few large chunks are not copied, and small ones take one turn
        if self.unread_bytes > _JOINED_BYTES and len(chunks) <= _FEW_CHUNKS:
            body = chunks.pop(0)
        else:
            body = b"".join(chunks)
            chunks.clear()
        self.unread_bytes -= len(body)
        self._is_read = self._is_received and not chunks
        return {"type": "http.request", "body": body, "more_body": not self._is_read}

    def _take_error(self) -> QkvError:
        # an error that is raised refers to the frames above, which refer to this object: if this
        # object kept the error, only a full collection would free both
        error, self._error, self._is_over = self._error, None, True
        assert error is not None
        return error

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    async def _wait(self) -> None:
        """Waits for a part of the body, its end, or the disconnect."""
        if self._expects_continue and not self._connection.transport.is_closing():
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        self._connection.resume_reading()  # else no disconnect is seen
        if self._news is None:
            self._news = asyncio.Event()
        self._news.clear()
        await self._news.wait()

    # the response

    async def run(self, app: ASGIApp) -> None:
        """Runs the application for this request; responds 500 if it fails before its response."""
        try:
            await app(self._scope, self.receive, self.send)
            is_gone = self._is_over or self._connection.transport.is_closing()
            if not (self.response_complete or is_gone):
                raise RuntimeError("the application returned without a response")
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # a client read too slowly in a drain
                _log.exception("the application failed")
            await self._send_failure()

    async def _send_failure(self) -> None:
        self.keep_alive = False
        if self.response_started:
            self._connection.transport.close()
            return
        start = {"type": "http.response.start", "status": 500, "headers": _FAILURE_HEADERS}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": _FAILURE})

    async def send(self, message: Message) -> None:
        """Sends the head of the response, or a part of its body; the ASGI callable.

        Raises:
            RuntimeError: the message is not the next one, or the body has another length.
        """
        connection = self._connection
        if connection.is_write_paused:
            await connection.until_writable()
        if connection.transport.is_closing():
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started, self._expects_continue = True, False
        named = dict(headers)
        if b"close" in named.get(b"connection", b"").lower():
            self.keep_alive = False
        elif not self.keep_alive or self._connection.is_last_response:
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
        head = _encode_head(status, [*self._connection.date, *headers])
        if self._is_streamed:  # the first part may take time
            self._connection.transport.write(head)
        else:
            self._head = head

    def _send_body(self, body: bytes | memoryview, more_body: bool) -> None:
        connection, head = self._connection, self._head
        write = connection.transport.write
        if self._scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            parts = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            write(b"".join(parts if more_body else [*parts, b"0\r\n\r\n"]))
        elif self._is_streamed:
            write(body)
        else:
            self._missing_bytes -= len(body)
            if self._missing_bytes < 0 or (self._missing_bytes and not more_body):
                raise RuntimeError("the body has not the length of Content-Length")
            if head is None:
                write(body)
            elif len(head) + len(body) > _JOINED_BYTES:
                self._head = None
                connection.transport.writelines((head, body))
            elif more_body:
                self._head = head + body  # goes with the next part
            else:
                self._head = None
                write(b"".join((head, body)))
        if not more_body:
            self.response_complete = self._is_over = True
            self._wake()
            connection.on_response_complete(self)


def _encode_head(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of a response.

    Raises:
        RuntimeError: a header has a line break.
    """
    text = b"".join([b"%b: %b\r\n" % header for header in headers])
    if text.count(b"\n") + text.count(b"\r") != 2 * len(headers):
        raise RuntimeError("a header has a line break")
    return b"%b%b\r\n" % (_STATUS_LINES[status], text)
