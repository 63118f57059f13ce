"""A connection as uvicorn has it, bounded in what a stranger may send on it and in what time, and
in how long an answer is kept for one who does not take it.

What is wrong is said in the protocol's own form, behind the answers that are still due, and ends
the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from qkv.errors import Internal, QkvError, TooLarge, TooLong, TooSlow, Unparseable
from qkv.server.connection_timeouts import Watch, untaken

__all__ = ["BODY", "NOTHING", "Connection", "path_of"]

_log = logging.getLogger("qkv.connection")

_MOST_HEADERS: Final = 100
_MOST_HEAD: Final = 1 << 16  # bytes of a url and of names and values of headers
_MOST_FRAMING: Final = 1 << 20  # bytes of a message that are no body: its head, lines of chunks
_MOST_IGNORED: Final = 1 << 28  # bytes of a body that come after its answer, or are never read
_LEAST_BITS: Final = 16  # of a body, 1 << 16 bytes at least have to come before patience ends

HEAD, BODY, NOTHING = range(3)  # what is being read


class Connection(HttpToolsProtocol):
    """One connection.

    Args:
        config, server_state, app_state, _loop: as uvicorn's protocols take them.
        watch: sees to it that what is read comes in time.
        refusal: what answers an error below a path.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        watch: Watch,
        refusal: Callable[[QkvError, str], Response],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._watch, self._refusal = watch, refusal
        self.url = b""
        self._reads = HEAD
        self._piece = self._framing = self._received = self._ignored = 0
        self._is_upgrade = False
        self._farewell: bytes | None = None  # what ends the connection, once there is something
        self._has_left = False
        self._seen: tuple[Any, int] | None = None
        self._looks = 0
        self._is_resting = False  # nothing is sent or answered, and uvicorn has set no timer
        self._rests = 0
        self._running: RequestResponseCycle | None = None
        self._unsent = self._unread = 0
        self._has_drained = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = SimpleNamespace(
            write=transport.write, is_closing=transport.is_closing, close=self._finish
        )
        self._watch.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.remove(self)
        self._leave_running()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = cast("asyncio.Transport", self._outlet)
        super()._start_asgi_task(cycle, app)

    def _leave_running(self) -> None:
        """Says that its caller has left to what is being answered; uvicorn says it to the request
        that came last, which may wait behind others."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """uvicorn's own, but for what it does with errors and upgrades."""
        if self._farewell is not None:
            self._ignore(len(data))
            return
        self._unset_keepalive_if_required()
        self._received += len(data)
        rest = memoryview(data)
        while self._farewell is None and (end := self._feed(rest)) is not None:
            rest = rest[end:]
            self._feed(self._head_without_upgrade())

    def _feed(self, data: bytes | memoryview) -> int | None:
        """Has it parsed; where a head ends that asks for another protocol, and comes again without
        that before what is behind it."""
        self._piece = len(data)
        self._framing += self._piece
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self.part(self._meant(error))
        else:
            if self._framing > _MOST_FRAMING:
                what = f"more than {_MOST_FRAMING} bytes"
                if self._reads == HEAD:
                    self.part(TooLong(f"the request's head has {what}"))
                else:
                    self.part(TooLarge(f"of the request, {what} are no body; send larger chunks"))
        return None

    def on_message_begin(self) -> None:
        self._reads, self._framing = HEAD, self._piece  # at most
        super().on_message_begin()

    def check_head(self) -> bool:
        """Whether the request whose head has come is to be answered; if it is not, it wants to go
        over to another protocol, and comes again without that.

        Raises:
            TooLong, Unparseable: it is refused; the parser stops.
        """
        names = [name for name, _ in self.headers]
        if len(names) > _MOST_HEADERS:
            raise TooLong(f"the request has {len(names)} headers; at most {_MOST_HEADERS} are read")
        if self._framing > _MOST_HEAD:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > _MOST_HEAD:
                raise TooLong(f"the request's head has {size} bytes; at most {_MOST_HEAD} are read")
        hosts = names.count(b"host")
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            raise Unparseable(f"the request has {hosts} Host headers; it must have one")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Unparseable("CONNECT asks for a proxy, and this is none")
            self._is_upgrade = True
            return False
        return True

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            self.url = _with_path(self.url)
        super().on_headers_complete()
        self._reads, self._ignored = BODY, 0
        self.headers = []  # what comes as headers from now on stands behind a body, and is not read

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._ignore(len(body))
        super().on_body(body)

    def _ignore(self, size: int) -> None:
        """Throws away what comes after its answer: a caller that sends all before it reads would
        see a broken connection otherwise. It has an end."""
        self._received += size if self._has_left else 0
        self._ignored += size
        if self._ignored > _MOST_IGNORED:
            self.transport.close()

    def _finish(self) -> None:
        """Closes behind an answer, where no more is to come on this connection."""
        if self._reads == BODY:
            self.pipeline.clear()
            self._farewell = b""  # it is said already
            self._leave()
        else:
            self.transport.close()

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._reads = NOTHING
            super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self._has_left:
            self._unset_keepalive_if_required()  # what is still sent has its own time
        elif self._farewell is not None and is_last:
            self._leave()

    def _begin_rest(self) -> None:
        """An answer is given that uvicorn knows nothing of."""
        self.server_state.total_requests += 1
        self._is_resting, self._rests, self._seen = True, 0, None

    def shutdown(self) -> None:
        if self._has_left:
            self.transport.close()
        super().shutdown()

    def resume_writing(self) -> None:
        self._has_drained = True
        super().resume_writing()

    def look(self) -> None:
        """Ends it where it is late; called every now and then."""
        if self._is_unread():
            self.drop()
            return
        if self._is_resting:
            self._rests += 1
            if self._rests * self._watch.period > self.timeout_keep_alive:
                self.transport.close()
            return
        seen = (self.scope, self._received >> _LEAST_BITS if self._reads == BODY else 0)
        before, self._seen = self._seen, seen
        if self._has_left:
            self._looks = self._looks + 1 if before == seen else 0
            if self._looks >= self._watch.linger:
                self.transport.close()
        elif before is None or before[0] is not seen[0] or before[1] != seen[1]:
            self._looks = 0
        elif self._is_awaited():
            self._looks += 1
            if self._looks >= self._watch.patience:
                self._looks = 0
                if self.scope is None or self._reads == NOTHING:
                    self.transport.close()  # nothing has come that could be answered
                    return
                self.part(TooSlow("the rest of the request did not come in time"))
        else:
            self._looks = 0

    def drop(self) -> None:
        """Ends it as it is: to close it would wait for what is not taken."""
        self._leave_running()
        self.transport.abort()

    def _is_unread(self) -> bool:
        """Whether for too long nothing was taken of what is written. What is added meanwhile hides
        nothing: little is, until it has drained."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent:
            self._unsent += untaken(self.transport)
        moves = not before or self._unsent < before or self._has_drained
        self._unread = 0 if moves else self._unread + 1
        self._has_drained = False
        return self._unread >= self._watch.unread

    def _is_awaited(self) -> bool:
        """Whether it is for the caller to send something, and nobody else measures the time."""
        if self.flow.read_paused or self._farewell is not None:
            return False
        if self._reads != NOTHING:
            return True
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and self.timeout_keep_alive_task is None

    def parse_anew(self) -> None:
        """Has what comes next read as a request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        """The head that has come, as if it asked for no other protocol; a parser stops where
        another begins, so that it needs one of its own."""
        self._is_upgrade = False
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parse_anew()
        kept = [h for h in self.headers if h[0] not in (b"upgrade", b"connection")]
        named = b",".join(value for name, value in self.headers if name == b"connection")
        if b"close" in [token.strip().lower() for token in named.split(b",")]:
            kept.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in kept])
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version.encode(), lines)

    def _meant(self, error: httptools.HttpParserError) -> QkvError:
        """What is wrong where the parser stopped."""
        cause = error.__context__
        if isinstance(cause, QkvError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError | UnicodeError):
            return Unparseable("this is no request of HTTP/1.1")
        _log.error("a connection failed", exc_info=cause)
        return Internal("this is a fault of the service, and is logged")

    def part(self, error: QkvError) -> None:
        """Ends the connection with an error, behind the answers that are due."""
        self._farewell, cycle = self._written(error), self.cycle
        if self._reads == BODY and self.pipeline:
            self.pipeline.popleft()  # the last one, whose body will not come: it has not begun
        elif self._reads == BODY:
            if cycle.response_complete:
                self._finish()
                return
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
            self._leave()
            return
        if cycle is None or cycle.response_complete:
            self._leave()

    def _leave(self) -> None:
        """Says the last word, and closes as soon as the caller has read it, or soon."""
        assert self._farewell is not None
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self._has_left, self._looks = True, 0
            self.flow.resume_reading()  # so that nothing unread resets what is said
            self.transport.write(self._farewell)
            self.transport.write_eof()

    def _written(self, error: QkvError, *more: tuple[bytes, bytes]) -> bytes:
        answer = self._refusal(error, path_of(self.url))
        headers = [*self.server_state.default_headers, *answer.raw_headers, *more]
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        status = STATUS_LINE[answer.status_code]
        return b"%b%bconnection: close\r\n\r\n%b" % (status, lines, bytes(answer.body))


def path_of(url: bytes) -> str:
    """The path of a target as it came, or of as much of it as has come."""
    if not url.startswith(b"/"):
        with suppress(httptools.HttpParserError):
            url = httptools.parse_url(url).path or b"/"
    return url.partition(b"?")[0].decode("ascii", "replace")


def _with_path(url: bytes) -> bytes:
    """A target in absolute form may have no path, which means "/" (RFC 9110, section 4.2.3)."""
    parsed = httptools.parse_url(url)
    if parsed.path:
        return url
    return b"/" if parsed.query is None else b"/?%b" % parsed.query
