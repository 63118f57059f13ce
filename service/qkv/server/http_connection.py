"""uvicorn's HTTP/1.1 protocol with limits: sizes of head and framing, read and write timeouts.

After an error a connection sends the pending responses, then an error response, and closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from qkv.errors import (
    HeadersTooLarge,
    Internal,
    MalformedRequest,
    PayloadTooLarge,
    QkvError,
    RequestTimeout,
    UnsupportedTransferCoding,
)
from qkv.server.connection_timeouts import ConnectionTimeouts, unsent_bytes
from qkv.server.request_cycle import RequestCycle, encode_head

__all__ = ["BODY", "NOTHING", "LimitedHttpProtocol", "path_of"]

_log = logging.getLogger(__name__)

_MAX_HEADERS: Final = 100
_MAX_HEAD_BYTES: Final = 1 << 16  # URL, and names and values of headers
_MAX_FRAMING_BYTES: Final = 1 << 20  # all of a request except its body: head, chunk sizes
_MAX_IGNORED_BYTES: Final = 1 << 28  # body bytes that arrive after the response, or are not read
_PROGRESS_BITS: Final = 16  # 1 << 16 bytes of a body must arrive within the read timeout

HEAD, BODY, NOTHING = range(3)  # the part of a request that the connection reads


class LimitedHttpProtocol(HttpToolsProtocol):
    """The HTTP/1.1 protocol of one connection, with limits.

    Args:
        config, server_state, app_state, _loop: as in uvicorn's protocols.
        timeouts: checks this connection periodically.
        error_response: builds the response for an error at a path.
        is_draining: True once each connection may bring only one more request.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        timeouts: ConnectionTimeouts,
        error_response: Callable[[QkvError, str], Response],
        is_draining: Callable[[], bool],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timeouts, self._error_response = timeouts, error_response
        self._is_draining = is_draining
        self.url = b""
        self._reading = HEAD
        self._chunk_bytes = self._framing_bytes = self._received_bytes = self._ignored_bytes = 0
        self._is_upgrade = False
        self._last_response: bytes | None = None  # sent before the connection closes
        self._is_lingering = False
        self._progress: tuple[Any, int] | None = None
        self._slow_checks = 0
        self._idle_checks = 0
        self._current_cycle: RequestCycle | None = None
        self.cycle: RequestCycle = None  # type: ignore[assignment]  # the last received
        self.queued_cycles: deque[RequestCycle] = deque()  # they wait for the current one
        self._unsent_bytes = self._unread_checks = 0
        self._has_drained = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timeouts.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeouts.remove(self)
        self._disconnect_cycle()
        if self.cycle is not None:
            self.cycle.disconnect()
            self.cycle = None  # type: ignore[assignment]  # it is not uvicorn's
        super().connection_lost(exc)

    def _start_cycle(self, cycle: RequestCycle) -> None:
        self._current_cycle = cycle
        task = self.loop.create_task(cycle.run(self.app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _disconnect_cycle(self) -> None:
        """Signals the disconnect to the running request; the last received one may be queued."""
        if self._current_cycle is not None and not self._current_cycle.response_complete:
            self._current_cycle.disconnect()

    def data_received(self, data: bytes) -> None:
        """Parses data as uvicorn does, except for errors and upgrades."""
        if self._last_response is not None:
            self._ignore(len(data))
            return
        self._received_bytes += len(data)
        rest = memoryview(data)
        while self._last_response is None and (end := self._feed(rest)) is not None:
            rest = rest[end:]
            self._feed(self._head_without_upgrade())

    def _feed(self, data: bytes | memoryview) -> int | None:
        """Parses data. Returns the end of a head that requests an upgrade, which must be parsed
        again without the upgrade."""
        self._chunk_bytes = len(data)
        self._framing_bytes += self._chunk_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self.close_with_error(self._error_from(error))
        else:
            if self._framing_bytes > _MAX_FRAMING_BYTES:
                size = f"more than {_MAX_FRAMING_BYTES} bytes"
                if self._reading == HEAD:
                    self.close_with_error(HeadersTooLarge(f"the request's head has {size}"))
                else:
                    self.close_with_error(
                        PayloadTooLarge(
                            f"the request has {size} beside its body; send larger chunks"
                        )
                    )
        return None

    def on_message_begin(self) -> None:
        self._reading, self._framing_bytes = HEAD, self._chunk_bytes  # an upper bound
        super().on_message_begin()

    def check_head(self) -> bool:
        """Checks a complete head. Returns False if it requests an upgrade: it is parsed again.

        Raises:
            HeadersTooLarge, MalformedRequest, UnsupportedTransferCoding: the head is rejected; the
                parser stops.
        """
        names = [name for name, _ in self.headers]
        if len(names) > _MAX_HEADERS:
            raise HeadersTooLarge(
                "the request has too many headers: "
                f"got {len(names)}, expected at most {_MAX_HEADERS}"
            )
        if self._framing_bytes > _MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > _MAX_HEAD_BYTES:
                raise HeadersTooLarge(
                    "the request's head is too large: "
                    f"got {size} bytes, expected at most {_MAX_HEAD_BYTES}"
                )
        hosts = names.count(b"host")
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            raise MalformedRequest(f"the request needs one Host header: got {hosts}")
        if b"transfer-encoding" in names:
            _check_transfer_coding(self.headers)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise MalformedRequest("CONNECT is not supported: this server is no proxy")
            self._is_upgrade = True
            return False
        return True

    def on_headers_complete(self) -> None:
        """Starts the request of a complete head, or queues it behind others (pipelining)."""
        if not self.url.startswith(b"/"):
            self.url = _with_path(self.url)
        scope: Any = self.scope
        url, version = httptools.parse_url(self.url), self.parser.get_http_version()
        path = url.path.decode("ascii")
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        before = self.cycle
        self.cycle = RequestCycle(
            scope,
            self.transport,
            self.flow,
            self.server_state.default_headers,
            keep_alive=version != "1.0"
            and self.parser.should_keep_alive()
            and not self._is_draining(),
            is_last=self._is_last_request,
            expects_continue=self.expect_100_continue,
            on_response=self.on_response_complete,
            close=self._close_after_response,
        )
        if before is None or before.response_complete:
            self._start_cycle(self.cycle)
        else:
            self.flow.pause_reading()
            self.queued_cycles.append(self.cycle)
        self._reading, self._ignored_bytes = BODY, 0
        self.headers = []  # later headers are trailers, which are not read

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._ignore(len(body))
            return
        self.cycle.add_chunk(body)
        if self.cycle.chunk_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _ignore(self, size: int) -> None:
        """Discards bytes that arrive after the response, up to a limit. Otherwise a client that
        sends all before it reads would see a broken connection."""
        self._received_bytes += size if self._is_lingering else 0
        self._ignored_bytes += size
        if self._ignored_bytes > _MAX_IGNORED_BYTES:
            self.transport.close()

    def _is_last_request(self) -> bool:
        """Returns True if the service drains, and no received request waits."""
        return self._is_draining() and not self.queued_cycles

    def _close_after_response(self) -> None:
        """Closes the connection after a response without keep-alive."""
        if self._reading == BODY:
            self.queued_cycles.clear()
            self._last_response = b""  # the response is sent already
            self._send_last_response()
        else:
            self.transport.close()

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._reading = NOTHING
            self.cycle.complete_body()

    def on_response_complete(self) -> None:
        """Starts the next request as uvicorn does, but sets no timer while there is none."""
        self.server_state.total_requests += 1
        self._idle_checks, self._progress = 0, None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.queued_cycles:
            self._start_cycle(self.queued_cycles.popleft())
        elif self._last_response is not None and not self._is_lingering:
            self._send_last_response()

    def shutdown(self) -> None:
        """Closes an idle connection; any other one closes after its last response."""
        if self._is_lingering:
            self.transport.close()
        if self._reading != HEAD or self.scope is None:  # else a part of a head has arrived
            super().shutdown()

    def resume_writing(self) -> None:
        self._has_drained = True
        super().resume_writing()

    def check(self) -> None:
        """Closes the connection if its client is too slow; called once every period."""
        if self._is_not_read():
            self.abort()
            return
        if self._is_idle:
            self._idle_checks += 1
            if self._idle_checks * self._timeouts.period_s > self.timeout_keep_alive:
                self.transport.close()
            return
        seen = (self.scope, self._received_bytes >> _PROGRESS_BITS if self._reading == BODY else 0)
        before, self._progress = self._progress, seen
        if self._is_lingering:
            self._slow_checks = self._slow_checks + 1 if before == seen else 0
            if self._slow_checks >= self._timeouts.linger_checks:
                self.transport.close()
        elif before is None or before[0] is not seen[0] or before[1] != seen[1]:
            self._slow_checks = 0
        elif self._is_client_due():
            self._slow_checks += 1
            if self._slow_checks >= self._timeouts.read_checks:
                self._slow_checks = 0
                if self.scope is None or self._reading == NOTHING:
                    self.transport.close()  # there is no request to respond to
                    return
                self.close_with_error(
                    RequestTimeout("the rest of the request did not arrive in time")
                )
        else:
            self._slow_checks = 0

    def abort(self) -> None:
        """Closes the connection at once; `close` would wait for the client to read."""
        self._disconnect_cycle()
        self.transport.abort()

    def _is_not_read(self) -> bool:
        """Returns True if the client has read nothing for too long. Added bytes hide no progress:
        few are added until the buffer has drained."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        if self._unsent_bytes:
            self._unsent_bytes += unsent_bytes(self.transport)
        moves = not before or self._unsent_bytes < before or self._has_drained
        self._unread_checks = 0 if moves else self._unread_checks + 1
        self._has_drained = False
        return self._unread_checks >= self._timeouts.write_checks

    @property
    def _is_idle(self) -> bool:
        """True if the connection waits for the next request."""
        return self._reading == NOTHING and self.cycle.response_complete and not self._is_lingering

    def _is_client_due(self) -> bool:
        """Returns True if the client must send something."""
        if self.flow.read_paused or self._last_response is not None:
            return False
        return self._reading != NOTHING or self.cycle.response_complete

    def _reset_parser(self) -> None:
        """Replaces the parser by a new one."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        """Returns the parsed head without the upgrade; replaces the parser, which has stopped."""
        self._is_upgrade = False
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self._reset_parser()
        headers = [h for h in self.headers if h[0] not in (b"upgrade", b"connection")]
        named = b",".join(value for name, value in self.headers if name == b"connection")
        if b"close" in [token.strip().lower() for token in named.split(b",")]:
            headers.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version.encode(), lines)

    def _error_from(self, error: httptools.HttpParserError) -> QkvError:
        """Returns the error that stopped the parser."""
        cause = error.__context__
        if isinstance(cause, QkvError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError | UnicodeError):
            return MalformedRequest("malformed HTTP/1.1 request")
        _log.error("a connection failed", exc_info=cause)
        return Internal("internal error; it was logged")

    def close_with_error(self, error: QkvError) -> None:
        """Closes the connection with an error response, after the pending responses."""
        self._last_response, cycle = self._encode_error(error), self.cycle
        if self._reading == BODY and self.queued_cycles:
            self.queued_cycles.pop()  # the last request: its body will not arrive
        elif self._reading == BODY:
            if cycle.response_complete:
                self._close_after_response()
                return
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnect()
            self._send_last_response()
            return
        if cycle is None or cycle.response_complete:
            self._send_last_response()

    def _send_last_response(self) -> None:
        """Sends the error response; closes once the client has read it, or after two seconds."""
        assert self._last_response is not None
        if not self.transport.is_closing():
            self._is_lingering, self._slow_checks = True, 0
            self.flow.resume_reading()  # closing over unread bytes would reset the connection
            self.transport.write(self._last_response)
            self.transport.write_eof()

    def _encode_error(self, error: QkvError, *more: tuple[bytes, bytes]) -> bytes:
        response = self._error_response(error, path_of(self.url))
        headers = [*response.raw_headers, *more, (b"connection", b"close")]
        head = encode_head(response.status_code, [*self.server_state.default_headers, *headers])
        return head + bytes(response.body)


def _check_transfer_coding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Checks that chunked is the only transfer coding; the parser accepts others before it.

    Raises:
        UnsupportedTransferCoding: there is another one (RFC 9112, section 6.1).
    """
    codings = b", ".join([value for name, value in headers if name == b"transfer-encoding"])
    if codings.strip().lower() != b"chunked":
        raise UnsupportedTransferCoding(
            "Transfer-Encoding is not supported: "
            f"got {codings.decode('latin-1')!r:.60}, expected chunked"
        )


def path_of(url: bytes) -> str:
    """Returns the path of a request target, or of its received part."""
    if not url.startswith(b"/"):
        with suppress(httptools.HttpParserError):
            url = httptools.parse_url(url).path or b"/"
    return url.partition(b"?")[0].decode("ascii", "replace")


def _with_path(url: bytes) -> bytes:
    """Returns an absolute-form target with a path; without one "/" (RFC 9110, section 4.2.3)."""
    parsed = httptools.parse_url(url)
    if parsed.path:
        return url
    return b"/" if parsed.query is None else b"/?%b" % parsed.query
