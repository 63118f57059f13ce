"""HTTP/1.1 under limits: the protocol that uvicorn runs for each connection.

uvicorn's own protocols bound neither the head of a request nor the time that a client takes, and
answer a malformed request without the application. This one hands it to the application, which
answers and records it as any other error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.server import ServerState

from qkv.errors import (
    PROTOCOL_ERROR,
    Internal,
    MalformedRequest,
    PayloadTooLarge,
    QkvError,
    RequestTimeout,
)
from qkv.server.client_timer import ClientTimer
from qkv.server.http_exchange import Exchange
from qkv.server.request_head import MAX_HEAD_BYTES, MAX_HEADERS, RequestHead

_log = logging.getLogger(__name__)

_MAX_FRAMING_BYTES: Final = 1 << 20  # all of a chunked body except its bytes: lines of chunks
_MAX_IGNORED_BYTES: Final = 1 << 28  # body bytes that arrive after the response, or are not read
# Of a body that the application has not taken: to stop and start reading costs four system calls,
# so that a few reads, which it takes in the next turn, do not do so.
_MAX_UNREAD_BYTES: Final = 1 << 20
_MAX_WAITING: Final = 16  # requests behind the one in progress, before more are read
_READ_BYTES: Final = 1 << 17  # twice as much takes 2 % more of a 768 KiB body, out of the cache
_PIECE_BYTES: Final = 1 << 12  # parsed at once, of all but a body of known length
_END_OF_HEAD: Final = b"\r\n\r\n"
_LEAST_HEAD_BYTES: Final = len(b"GET / HTTP/1.0")
_LINGER_S: Final = 2.0  # a client that sends while the connection closes would not see its response
_PROGRESS_BITS: Final = 16  # 1 << 16 bytes of a body must arrive within the read timeout

_HEAD, _BODY, _NOTHING = range(3)  # the part of a request that the connection reads


@dataclass(frozen=True)
class HttpLimits:
    """The limits of the connections of one process.

    Attributes:
        read_timeout_s: seconds for a head, and for each 64 KiB of a body.
        is_draining: True once each connection may bring only one more request.
        read_buffer: receives what a connection parses; each read ends before the next begins.
    """

    read_timeout_s: float
    is_draining: Callable[[], bool] = lambda: False
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_READ_BYTES)))


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection: parses requests, and closes if its client is too slow.

    The parser and the timer refer to this object, so that all are freed at once only because
    `connection_lost` removes both.

    Args:
        config: of uvicorn: the application, and the seconds that a connection may be idle.
        server_state: of uvicorn: has the connections and the requests in progress.
        limits: of the connections.

    Attributes:
        transport: of the socket.
        client: address and port of the client.
        is_write_paused: the client does not read what was written.
        idle_since: the end of the last response, by the time of the event loop.
    """

    transport: asyncio.Transport

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, limits: HttpLimits, **_: Any
    ) -> None:
        self._app, self._state, self._limits = config.loaded_app, server_state, limits
        self._idle_s = config.timeout_keep_alive
        self._loop = asyncio.get_running_loop()
        self.idle_since = self._loop.time()
        self.client: tuple[str, int] | None = None
        self._local: tuple[str, int] | None = None
        # the request that is received, or was received last
        self._parser: httptools.HttpRequestParser | None = None
        self._reading = _HEAD
        self._head = RequestHead()
        self._is_upgrade = False
        self._piece_bytes = self._request_bytes = 0  # parsed now, and of the request so far
        self._declared_bytes = self._body_bytes = self._ignored_bytes = 0
        self._unparsed: bytes | memoryview = b""  # behind many requests that wait
        self._message_count = 0
        self._last: Exchange | None = None
        self._current: Exchange | None = None  # whose response is sent next
        self._waiting = deque[Exchange]()  # behind the one in progress (pipelining)
        # flow
        self._is_read_paused = self.is_write_paused = False
        self._is_ending = self._is_lingering = False
        self._writable = asyncio.Event()
        self._timer: ClientTimer | None = None

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles the event as an asyncio protocol."""
        self.transport = transport
        self.client = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        self._parser = self._new_parser()
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes
        self._timer = ClientTimer(self._wait, self._end, self._limits.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the application that the client is gone."""
        self._state.connections.discard(self)
        assert self._timer is not None
        self._timer.stop()
        self._timer = self._parser = None
        for exchange in (self._last, *self._waiting, self._current):
            if exchange is not None:
                exchange.disconnect()
        self._last = self._current = None
        self._waiting.clear()
        self.resume_writing()

    def shutdown(self) -> None:
        """Closes the connection, or lets it close after its last response; uvicorn calls it."""
        if self._is_lingering:
            return  # it closes soon
        if self._has_part_of_head:
            self._is_ending = True  # the response to its request closes the connection
        elif self._is_answered:
            self.transport.close()
        else:
            assert self._last is not None
            self._last.keep_alive = False

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress, and the client has its responses.

        Part of a head is no request yet, or a client could stay by sending a byte.
        """
        has_sent = not self.transport.get_write_buffer_size()
        return self._is_answered and has_sent and not self.transport.is_closing()

    @property
    def _is_answered(self) -> bool:
        return self._last is None or self._last.response_complete

    @property
    def _has_part_of_head(self) -> bool:
        return self._reading == _HEAD and self._message_count > 0

    # bytes

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Returns the buffer of the next bytes."""
        return self._limits.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handles the event as an asyncio protocol."""
        if self._parser is None:
            self._body_bytes += nbytes
            self._ignore(nbytes)
        else:
            self._parse(self._limits.read_buffer[:nbytes])

    def _parse(self, data: bytes | memoryview) -> None:
        """Parses bytes in pieces, and keeps those behind many requests that wait: a request takes
        forty times its bytes. A head that requests an upgrade is parsed again without it."""
        while data and self._parser is not None:
            if len(self._waiting) > _MAX_WAITING:
                self._unparsed = bytes(data)
                return
            size = self._next_bytes(data)
            end = self._feed(self._parser, data[:size])
            data = data[size if end is None else end :]
            if end is not None:
                self._is_upgrade = False
                method, version = self._parser.get_method(), self._parser.get_http_version()
                self._parser = self._new_parser()  # the other one has stopped
                self._feed(self._parser, self._head.without_upgrade(method, version))

    def _next_bytes(self, data: bytes | memoryview) -> int:
        """Returns the number of bytes that are parsed at once: a body of known length, or 4 KiB
        with one head at most before a larger body, which then is a single chunk."""
        if self._reading == _BODY and self._declared_bytes > self._body_bytes:
            return self._declared_bytes - self._body_bytes
        if self._reading == _BODY or len(data) <= _PIECE_BYTES:
            return _PIECE_BYTES
        end = bytes(data[:_PIECE_BYTES]).find(_END_OF_HEAD, _LEAST_HEAD_BYTES)
        return _PIECE_BYTES if end < 0 else end + len(_END_OF_HEAD)

    def _feed(self, parser: httptools.HttpRequestParser, data: bytes | memoryview) -> int | None:
        """Parses a piece; returns the end of a head that requests an upgrade."""
        self._piece_bytes = len(data)
        self._request_bytes += self._piece_bytes
        try:
            parser.feed_data(data)
            self._check_bounds()
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self._fail(_error_from(error))
        except QkvError as error:
            self._fail(error)
        return None

    def _check_bounds(self) -> None:
        """Bounds the head or the trailers, what the parser holds of a target or a header, and the
        lines of chunks."""
        framing_bytes = self._request_bytes - self._body_bytes
        if framing_bytes > MAX_HEAD_BYTES or len(self._head.headers) > MAX_HEADERS:
            self._head.check_bounds()
            if self._reading == _HEAD and framing_bytes > MAX_HEAD_BYTES + _READ_BYTES:
                raise RequestHead.too_large()
            if framing_bytes > _MAX_FRAMING_BYTES:
                raise PayloadTooLarge(
                    f"the request has more than {_MAX_FRAMING_BYTES} bytes beside its body; "
                    "send larger chunks"
                )

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

    # a request, as the parser calls

    def on_message_begin(self) -> None:
        """Begins a head."""
        self._reading, self._request_bytes = _HEAD, self._piece_bytes  # an upper bound
        self._declared_bytes = self._body_bytes = 0
        self._message_count += 1
        self._head = RequestHead()

    def on_url(self, url: bytes) -> None:
        """Adds a part of the request's target."""
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, or a trailer, which is not read."""
        self._head.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Starts the request of a complete head, or queues it behind others."""
        assert self._parser is not None
        parser, head = self._parser, self._head
        self._check_bounds()
        version = parser.get_http_version()
        by_name = head.check(version)
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise MalformedRequest("CONNECT is not supported: this server is no proxy")
            self._is_upgrade = True
            return
        scope = head.scope(parser.get_method().decode("ascii"), version)
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self._is_ending
        expects = b"expect" in by_name and by_name[b"expect"].lower() == b"100-continue"
        self._reading, self._ignored_bytes = _BODY, 0
        self._declared_bytes = int(by_name.get(b"content-length", 0))
        self._head = RequestHead()  # of the trailers
        self._add(scope, keep_alive, expects and version == "1.1")

    def on_body(self, body: bytes) -> None:
        """Adds a part of a body."""
        exchange = self._last
        assert exchange is not None
        self._body_bytes += len(body)
        if exchange.response_complete:
            self._ignore(len(body))
            return
        exchange.add_chunk(body)
        if exchange.unread_bytes > _MAX_UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """Ends a request."""
        if not self._is_upgrade:
            assert self._last is not None
            if self._head.headers:  # the trailers
                self._check_bounds()
            self._reading = _NOTHING
            self._last.complete_body()

    def _add(self, scope: dict[str, Any], keep_alive: bool, expects_continue: bool) -> Exchange:
        """Starts an exchange, or lets it wait for the response before."""
        scope["client"], scope["server"] = self.client, self._local
        exchange = Exchange(self, scope, keep_alive, expects_continue)
        is_first, self._last = self._is_answered, exchange
        if is_first:
            self._start(exchange)
        else:
            self._pause_reading()
            self._waiting.append(exchange)
        return exchange

    def _fail(self, error: QkvError) -> None:
        """Reads no more requests; the application answers the error after the responses before."""
        method = "?"
        if self._parser is not None and self._head.target:
            method = self._parser.get_method().decode("ascii")
        self._parser = None
        error = error.with_traceback(None)  # its frames refer to this object
        if self._reading == _BODY:
            assert self._last is not None
            self._last.fail(error)
            if self._last.response_complete:
                self._linger()
            return
        scope = self._head.scope_of_part(method)
        scope[PROTOCOL_ERROR] = error
        self._add(scope, keep_alive=False, expects_continue=False).complete_body()

    # responses

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        self._state.total_requests += 1
        self._state.tasks.add(self._loop.create_task(self._run(exchange)))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await exchange.run(self._app)
        finally:
            # a callback of the task would cost another turn of the event loop
            task = asyncio.current_task()
            assert task is not None
            self._state.tasks.discard(task)

    @property
    def date(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response: Date (RFC 9110, section 6.6.1)."""
        return self._state.default_headers

    @property
    def is_last_response(self) -> bool:
        """True if the process drains, and no request waits that was received, also in part."""
        return self._limits.is_draining() and not (self._waiting or self._has_part_of_head)

    def on_response_complete(self, exchange: Exchange) -> None:
        """Starts the next request, or closes the connection."""
        self.idle_since = self._loop.time()
        if exchange.keep_alive:
            self.resume_reading()
            if self._waiting:
                self._start(self._waiting.popleft())
        else:
            self._linger()

    def _linger(self) -> None:
        """Closes the connection once its client has read the response, or after two seconds:
        closing over unread bytes would reset it."""
        self._waiting.clear()
        self._parser, self._is_lingering = None, True
        if not self.transport.is_closing():
            self.resume_reading()
            self.transport.write_eof()

    # flow

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads from the socket again, unless many requests wait."""
        if not self._is_read_paused or self.transport.is_closing():
            return
        data, self._unparsed = self._unparsed, b""
        self._parse(data)
        if len(self._waiting) <= _MAX_WAITING:
            self._is_read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Handles the event as an asyncio protocol."""
        self.is_write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """Handles the event as an asyncio protocol."""
        self.is_write_paused = False
        self._writable.set()

    async def until_writable(self) -> None:
        """Waits until the client has read most of what was written, or is gone."""
        await self._writable.wait()

    # the time of the client

    def _wait(self) -> tuple[float | None, object]:
        """Returns the seconds that the client may take now, None if nothing is expected of it, and
        what it has done so far."""
        progress = (
            self._message_count, self._is_answered, self._is_lingering,
            self._body_bytes >> _PROGRESS_BITS,
        )  # fmt: skip
        if self.transport.is_closing():
            return None, progress
        if self._is_lingering:
            return _LINGER_S, progress
        if self._parser is None or self._is_read_paused:
            return None, progress
        if self._reading == _NOTHING:
            return (self._idle_s if self.is_idle else None), progress
        return self._limits.read_timeout_s, progress

    def _end(self) -> None:
        """Closes the connection of a slow client; a request that has not arrived gets 408."""
        is_due = self._has_part_of_head or (self._reading == _BODY and not self._is_answered)
        if is_due and not self._is_lingering:
            self._fail(RequestTimeout("the rest of the request did not arrive in time"))
        else:
            self.transport.close()


def _error_from(error: httptools.HttpParserError) -> QkvError:
    """Returns the error that stopped the parser."""
    cause = error.__context__
    if isinstance(cause, QkvError):
        return cause
    if cause is None or isinstance(cause, httptools.HttpParserError | UnicodeError):
        return MalformedRequest(f"malformed HTTP/1.1 request: {cause or error}")
    _log.error("a connection failed", exc_info=cause)
    return Internal("internal error; it was logged")


def _address(name: Any) -> tuple[str, int] | None:
    """Returns address and port of a socket; None: it has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
