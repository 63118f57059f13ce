"""One HTTP/1.1 connection: parses requests under limits, and closes if its client is too slow.

After an error a connection sends the pending responses, then an error response, and closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final
from urllib.parse import unquote

import httptools

from qkv.api.observability import REQUEST_ID_HEADER
from qkv.api.server_request import Header, ProtocolError, ServerRequest
from qkv.errors import (
    HeadersTooLarge,
    Internal,
    MalformedRequest,
    PayloadTooLarge,
    QkvError,
    RequestTimeout,
)
from qkv.server.client_progress import ClientProgress
from qkv.server.http_request import HttpRequest, encode_head
from qkv.server.http_server import HttpServer
from qkv.server.request_head import check_head, check_size, path_of, with_path, without_upgrade

__all__ = ["HttpConnection"]

_log = logging.getLogger(__name__)

_MAX_FRAMING_BYTES: Final = 1 << 20  # all of a request except its body: head, chunk sizes
_MAX_IGNORED_BYTES: Final = 1 << 28  # body bytes that arrive after the response, or are not read
_MAX_UNREAD_BYTES: Final = 1 << 16  # of a body that the application has not taken
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}

_HEAD, _BODY, _NOTHING = range(3)  # the part of a request that the connection reads


class HttpConnection(asyncio.BufferedProtocol):
    """The protocol of one connection.

    Args:
        server: has the application, the limits, and all connections.

    Attributes:
        transport: of the socket.
        client: address and port of the client.
    """

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.client: tuple[str, int] | None = None
        self._local: tuple[str, int] | None = None
        # the request that is received, or was received last
        self._parser = self._new_parser()
        self._reading = _HEAD
        self._message_count = 0
        self._url = b""
        self._headers: list[Header] = []
        self._head_bytes = 0  # of the URL, and of the headers or trailers
        self._is_upgrade = False
        self._piece_bytes = self._framing_bytes = self._received_bytes = self._ignored_bytes = 0
        self._last: HttpRequest | None = None
        # a body that is received into its buffer, not by the parser
        self._body: memoryview | None = None
        self._body_end: asyncio.Future[None] | None = None
        self._has_skipped_body = False
        # responses
        self._current: HttpRequest | None = None
        self._waiting = deque[HttpRequest]()  # requests behind the current one
        self._last_response: bytes | None = None  # sent before the connection closes
        self._is_lingering = False
        # flow
        self._is_read_paused = False
        self.is_write_paused = False
        self._writable = asyncio.Event()
        self._progress = ClientProgress()

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles the event as an asyncio protocol."""
        self.transport = transport
        self.client = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the application that the client is gone."""
        self._server.remove(self)
        self._stop_filling()
        for request in (self._current, self._last):
            if request is not None and not request.response_complete:
                request.disconnect()
        self._waiting.clear()
        self.resume_writing()
        # no cycle may keep the connection: a worker never runs a full collection
        self._current = self._last = None
        del self._parser

    def close_when_idle(self) -> None:
        """Closes the connection, or lets it close after its last response."""
        if self._is_lingering:
            self.transport.close()
        elif self._reading == _HEAD and self._message_count:
            return  # a part of a head has arrived: its response closes the connection
        elif self._last is None or self._last.response_complete:
            self.transport.close()
        else:
            self._last.keep_alive = False

    def close_if_idle(self) -> bool:
        """Closes the connection unless it has a request in progress; returns True if it did.

        Part of a head is no request yet, or a client could stay by sending a byte.
        """
        is_idle = self._last is None or self._last.response_complete
        if not is_idle or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        self.transport.close()
        return True

    def abort(self) -> None:
        """Closes the connection at once; `close` would wait for the client to read."""
        if self._current is not None and not self._current.response_complete:
            self._current.disconnect()
        self.transport.abort()

    # bytes

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Returns the buffer of the next bytes: the rest of a body, if it has one."""
        return self._server.read_buffer if self._body is None else self._body

    def buffer_updated(self, nbytes: int) -> None:
        """Handles received bytes."""
        self._received_bytes += nbytes
        if self._body is not None:
            self._server.observer.received(nbytes)
            self._body = self._body[nbytes:]
            if not self._body:
                self._has_skipped_body = True
                self._stop_filling()
                self.on_message_complete()
        elif self._last_response is not None:
            self._ignore(nbytes)
        else:
            self._parse(self._server.read_buffer[:nbytes])

    def _parse(self, data: memoryview) -> None:
        """Parses received bytes. A head that requests an upgrade is parsed again without it."""
        if self._has_skipped_body:
            self._has_skipped_body = False
            self._parser = self._new_parser()
        while self._last_response is None and (end := self._feed(data)) is not None:
            data = data[end:]
            self._feed(self._head_without_upgrade())

    def _feed(self, data: bytes | memoryview) -> int | None:
        """Parses bytes; returns the end of a head that requests an upgrade."""
        self._piece_bytes = len(data)
        self._framing_bytes += self._piece_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self._close_with_error(_error_from(error))
        else:
            if self._framing_bytes > _MAX_FRAMING_BYTES:
                self._close_with_error(self._framing_error())
        return None

    def _framing_error(self) -> QkvError:
        size = f"more than {_MAX_FRAMING_BYTES} bytes"
        if self._reading == _HEAD:
            return HeadersTooLarge(f"the request's head has {size}")
        return PayloadTooLarge(f"the request has {size} beside its body; send larger chunks")

    def _ignore(self, size: int) -> None:
        """Discards bytes that arrive after the response, up to a limit. Otherwise a client that
        sends all before it reads would see a broken connection."""
        self._ignored_bytes += size
        if self._ignored_bytes > _MAX_IGNORED_BYTES:
            self.transport.close()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # a request behind the one with `Connection: close` is ignored, not an error
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head_without_upgrade(self) -> bytes:
        """Returns the parsed head without the upgrade; replaces the parser, which has stopped."""
        self._is_upgrade = False
        method, version = self._parser.get_method(), self._parser.get_http_version()
        self._parser = self._new_parser()
        return without_upgrade(method, self._url, version, self._headers)

    # a request, as the parser calls

    def on_message_begin(self) -> None:
        """Begins a head."""
        self._reading, self._framing_bytes = _HEAD, self._piece_bytes  # an upper bound
        self._message_count += 1
        self._url, self._headers, self._head_bytes = b"", [], 0

    def on_url(self, url: bytes) -> None:
        """Adds a part of the request's target."""
        self._head_bytes += len(url)
        check_size(0, self._head_bytes)
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, or a trailer, which is not read."""
        self._head_bytes += len(name) + len(value)
        check_size(len(self._headers) + 1, self._head_bytes)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Starts the request of a complete head, or queues it behind others (pipelining)."""
        parser, version = self._parser, self._parser.get_http_version()
        keep_alive = version == "1.1" and parser.should_keep_alive()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self._local,
            "client": self.client,
            "scheme": "http",
            "root_path": "",
            "headers": self._headers,
        }
        request = HttpRequest(self, scope, keep_alive and not self._server.is_draining())
        check_head(self._headers, request.headers, version)
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise MalformedRequest("CONNECT is not supported: this server is no proxy")
            self._is_upgrade = True
            return
        if not self._url.startswith(b"/"):
            self._url = with_path(self._url)
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        before, self._last = self._last, request
        self._reading, self._ignored_bytes = _BODY, 0
        self._headers, self._head_bytes = [], 0  # those of trailers
        if before is None or before.response_complete:
            self._start(request)
        else:
            self._pause_reading()
            self._waiting.append(request)

    def on_body(self, body: bytes) -> None:
        """Adds a part of a body."""
        assert self._last is not None
        size = len(body)
        self._framing_bytes -= size
        self._server.observer.received(size)
        if self._last.response_complete:
            self._ignore(size)
            return
        self._last.add_chunk(body)
        if self._last.received_bytes > _MAX_UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """Ends a request."""
        if not self._is_upgrade:
            assert self._last is not None
            self._reading = _NOTHING
            self._last.complete_body()

    async def receive_into(self, buffer: memoryview) -> None:
        """Receives the rest of a body directly into its buffer: a parser would copy each piece.

        Returns early after a disconnect, or an error of the request.
        """
        self._body, self._body_end = buffer, asyncio.get_running_loop().create_future()
        self.resume_reading()
        await self._body_end

    def _stop_filling(self) -> None:
        end, self._body, self._body_end = self._body_end, None, None
        if end is not None and not end.done():
            end.set_result(None)

    # responses

    def _start(self, request: HttpRequest) -> None:
        self._current = request
        tasks = self._server.tasks
        task = asyncio.get_running_loop().create_task(request.run(self._server.app))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    @property
    def date(self) -> bytes:
        """The header Date with its end of line."""
        return self._server.date

    @property
    def is_last_request(self) -> bool:
        """True if the service drains, and no received request waits."""
        return self._server.is_draining() and not self._waiting

    @property
    def is_only_request(self) -> bool:
        """True if no other request of this process is in progress."""
        return len(self._server.tasks) < 2

    def on_response_complete(self) -> None:
        """Starts the next request."""
        self._progress.begin_request()
        if self.transport.is_closing():
            return
        self._server.begin_idle(self)
        self.resume_reading()
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._last_response is not None and not self._is_lingering:
            self._send_last_response()

    def close_after_response(self) -> None:
        """Closes the connection after a response without keep-alive."""
        if self._reading == _BODY:
            self._waiting.clear()
            self._last_response = b""  # the response is sent already
            self._send_last_response()
        else:
            self.transport.close()

    def _close_with_error(self, error: QkvError) -> None:
        """Closes the connection with an error response, after the pending responses."""
        self._stop_filling()
        self._last_response, last = self._encode_error(error), self._last
        if self._reading == _BODY and self._waiting:
            self._waiting.pop()  # the last request: its body will not arrive
        elif self._reading == _BODY:
            assert last is not None
            if last.response_complete:
                self.close_after_response()
            elif last.response_started:
                self.transport.close()
            else:
                last.disconnect()
                self._send_last_response()
            return
        if last is None or last.response_complete:
            self._send_last_response()

    def _send_last_response(self) -> None:
        """Sends the error response; closes once the client has read it, or after two seconds."""
        assert self._last_response is not None
        if not self.transport.is_closing():
            self._is_lingering = True
            self._progress.begin_request()
            self.resume_reading()  # closing over unread bytes would reset the connection
            self.transport.write(self._last_response)
            self.transport.write_eof()

    def _encode_error(self, error: QkvError) -> bytes:
        """Records an error here if the application never sees its request, else in the request."""
        observer, url = self._server.observer, self._url
        request: ServerRequest
        if self._reading == _BODY and self._last is not None:
            request = self._last
        elif self._reading == _HEAD:
            request = ServerRequest(self._headers)
        else:  # url and headers are those of the request before
            request, url = ServerRequest(()), b""
        response = self._server.error_response(error, path_of(url))
        id = observer.id_of(request)
        more = ((REQUEST_ID_HEADER, id), (b"connection", b"close"))
        head = encode_head(response.status_code, [*response.raw_headers, *more], self.date)
        body = bytes(response.body)
        protocol_error = ProtocolError(error, len(body))
        if isinstance(request, HttpRequest) and not self._waiting:
            if not request.response_started:
                request.protocol_error = protocol_error
        else:
            method = self._parser.get_method().decode() if url else "?"
            path = path_of(url) if url else ""
            observer.record_protocol_error(method, path, request, protocol_error)
        return head + body

    # flow

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads from the socket again."""
        if self._is_read_paused:
            self._is_read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Handles the event as an asyncio protocol."""
        self.is_write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """Handles the event as an asyncio protocol."""
        self._progress.has_drained, self.is_write_paused = True, False
        self._writable.set()

    async def until_writable(self) -> None:
        """Waits until the client has read most of what was written."""
        await self._writable.wait()

    # the periodic check

    def check(self) -> None:
        """Closes the connection if its client is too slow; called once every period."""
        if self._progress.is_unread(self.transport, self._server.write_checks):
            self.abort()
        elif self._is_idle:
            if self._progress.is_idle_for(self._server.idle_checks):
                self.transport.close()
        else:
            received = self._received_bytes if self._reading == _BODY else 0
            is_due = self._is_lingering or self._is_client_due()
            checks = self._server.linger_checks if self._is_lingering else self._server.read_checks
            if self._progress.is_slow(self._message_count, received, checks, is_due):
                self._end_slow_request()

    def _end_slow_request(self) -> None:
        if self._is_lingering or not self._message_count or self._reading == _NOTHING:
            self.transport.close()  # there is no request to respond to
        else:
            self._close_with_error(RequestTimeout("the rest of the request did not arrive in time"))

    @property
    def _is_idle(self) -> bool:
        """True if the connection waits for the next request."""
        if self._reading != _NOTHING or self._is_lingering:
            return False
        return self._last is not None and self._last.response_complete

    def _is_client_due(self) -> bool:
        """Returns True if the client must send something."""
        if self._is_read_paused or self._last_response is not None:
            return False
        return self._reading != _NOTHING or self._last is None or self._last.response_complete


def _error_from(error: httptools.HttpParserError) -> QkvError:
    """Returns the error that stopped the parser."""
    cause = error.__context__
    if isinstance(cause, QkvError):
        return cause
    if cause is None or isinstance(cause, httptools.HttpParserError | UnicodeError):
        return MalformedRequest("malformed HTTP/1.1 request")
    _log.error("a connection failed", exc_info=cause)
    return Internal("internal error; it was logged")


def _address(name: Any) -> tuple[str, int] | None:
    """Returns address and port of a socket; None: it has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
