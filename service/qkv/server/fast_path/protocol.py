"""uvicorn's HTTP/1.1 protocol, with a fast path for repeated small requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from qkv.api.auth import ApiKeys
from qkv.api.direct_routes import ACCEPTED_STATE
from qkv.api.fast_path.run_cache import Header, Reply, RequestKey, RunCache
from qkv.api.observability import (
    PROTOCOL_ERROR_STATE,
    REQUEST_ID_HEADER,
    REQUEST_ID_STATE,
    ProtocolError,
    RequestObserver,
    request_id_from,
)
from qkv.api.request_body import BODY_READER_STATE
from qkv.engine.admission import AdmissionController
from qkv.errors import QkvError, ServiceUnavailable
from qkv.server.body_receiver import BodyReceiver
from qkv.server.connection_timeouts import ConnectionTimeouts
from qkv.server.fast_path.busy_poll import BusyPoll
from qkv.server.fast_path.pending_request import PendingRequest, ReadyBatch, RequestHead
from qkv.server.http_connection import BODY, NOTHING, LimitedHttpProtocol, path_of
from qkv.telemetry.worker_state import WorkerState

__all__ = ["FastPathProtocol"]

_log = logging.getLogger(__name__)

_JOINED: Final = 1 << 16  # bytes; less is copied sooner than it is written in pieces


class FastPathProtocol(LimitedHttpProtocol):
    """The HTTP/1.1 protocol of one connection, with the fast path.

    A request that the run cache knows is kept from uvicorn until its last byte is there. It
    is answered then, or uvicorn goes on with all of it as if it had just come: a task, an ASGI
    application and two queues for each request take longer than a small attention.

    Args:
        config, server_state, app_state, _loop: as uvicorn's protocols take them.
        timeouts, error_response: as `LimitedHttpProtocol` takes them.
        worker: counts requests, and says when the service ends; then there are no short ways.
        run_cache: what can be answered at once.
        ready_batch: of all connections of this process.
        busy_poll: keeps its loop awake for a lone caller.
        admission: lets in what they are asked, where it does not come with its head.
        api_keys: who has none of them goes the long way, which refuses; None: all are let in.
        observer: sees what they answer, and all bodies that come.
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
        worker: WorkerState,
        run_cache: RunCache,
        ready_batch: ReadyBatch,
        busy_poll: BusyPoll,
        admission: AdmissionController,
        observer: RequestObserver,
        api_keys: ApiKeys | None = None,
    ) -> None:
        super().__init__(
            config, server_state, app_state, _loop, timeouts=timeouts, error_response=error_response
        )
        self._worker, self._run_cache, self._api_keys = worker, run_cache, api_keys
        self._observer, self._ready_batch, self._admission = observer, ready_batch, admission
        self._busy_poll = busy_poll
        self._short: PendingRequest | None = None
        self._body_receiver: BodyReceiver | None = None
        self._piece_of: bytes | None = None  # what is parsed, where a request begins with it
        self._head: RequestHead | None = None
        self._is_long = False  # what is parsed goes the long way
        self._is_behind = False  # a body has gone past the parser

    def data_received(self, data: bytes) -> None:
        """Skips the parser for a request that begins with the bytes of the last head."""
        if (
            self._is_idle
            and (head := self._head) is not None
            and len(data) <= head.length
            and data.startswith(head.text)
            and not self.flow.write_paused
        ):
            self._take_again(head, data)
            return
        self.answer()  # before a parser goes on
        self._is_idle = False
        self._piece_of = data if self._reading == NOTHING else None
        self._parse(data)
        short = self._short
        is_waiting = self._body_receiver is not None or self._last_response is not None
        if short is not None and not short.is_whole and not is_waiting:
            self._keep_head(short)
            self._await(short)
        self._piece_of = None

    def _take_again(self, head: RequestHead, data: bytes) -> None:
        """Takes a request with the same head as the last one, if the connection is free."""
        self._is_idle = False
        self.url, self.headers = head.asked.url, head.headers
        self._short = short = PendingRequest(head.asked, head.known, head.id, data)
        self._worker.add_in_flight(1)
        body = memoryview(data)[len(head.text) :]
        short.chunks.append(body)
        self._observer.received(len(body))
        self._received_bytes += len(data)
        if len(data) == head.length:
            self._complete(short)
        else:
            self._await(short)

    def _keep_head(self, short: PendingRequest) -> None:
        """Keeps the head of a request, since the next request may have the same bytes."""
        if self._piece_of is not None:
            self._head = RequestHead.of(self._piece_of, short, self.headers) or self._head

    def _await(self, short: PendingRequest) -> None:
        """More of its body is to come, and needs no parser.

        Only now it takes room, as those do that go the long way: what comes with its head is gone
        when this turn of the loop ends.
        """
        try:
            short.place = self._admission.admit(short.asked.size)
        except ServiceUnavailable:
            self._take_long_way()  # it is rejected there
            return
        rest = np.empty(short.asked.size - sum(map(len, short.chunks)), np.uint8).data
        short.chunks.append(rest)
        self._reading = BODY
        self._fill(rest)

    def on_headers_complete(self) -> None:
        if not self.check_head():
            self._piece_of = None  # it comes again in other words
            return
        if not self._is_long and self._is_free() and self.parser.get_method() == b"POST":
            asked = RequestKey.of(self.url, self.headers)
            if (
                (known := self._run_cache.find(asked)) is not None
                and self.parser.get_http_version() == "1.1"
                and (self._api_keys is None or self._api_keys.match(self.headers))
            ):
                self._short = PendingRequest(asked, known, request_id_from(self.headers))
                self._reading = BODY
                self._worker.add_in_flight(1)
                return
        self._start()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        if not self._is_long:
            self._observer.received(len(body))
        if self._short is not None:
            self._short.chunks.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._short is None:
            super().on_message_complete()
            return
        self._reading = NOTHING
        self._keep_head(self._short)
        self._complete(self._short)

    def _complete(self, short: PendingRequest) -> None:
        """All of it is there; what others have sent is read before it is answered: a caller who is
        quick to ask again would be read again and again."""
        short.is_whole = True
        if len(self.connections) > 1:
            self._ready_batch.add(self, self.loop)
        else:
            self.answer()

    def on_message_begin(self) -> None:
        self.answer()  # one after the other, in their order
        self._is_idle = False
        super().on_message_begin()

    def run(self) -> int:
        """Runs what came in short and whole, once, if it can be answered at once; the bytes of
        tensors that it made."""
        short = self._short
        if short is None or not short.is_whole or short.has_run:
            return 0
        short.has_run = True
        if self._worker.shared_state.is_draining:  # then more is to be said than the answer
            return 0
        try:
            short.done = self._run_cache.run(short.known, short.chunks)
        except Exception:  # the long way says it to the caller
            _log.exception("a shortcut failed")
        return 0 if short.done is None else short.done.inline_run.job.bytes_out

    def answer(self) -> None:
        """Sends the response of a complete fast-path request once."""
        self.run()
        short = self._short
        if short is None or not short.has_run:
            return
        reply = None
        if short.done is not None:
            try:
                reply = self._run_cache.reply(short.done)
            except Exception:
                _log.exception("a shortcut failed")
        if reply is None:
            self._take_long_way()
        else:
            self._write(short, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._short is not None:
            self._forget(self._short)
        if self._body_receiver is not None:
            self._body_receiver.end(False)
            self._body_receiver = None
        super().connection_lost(exc)

    def abort(self) -> None:
        """Forgets the pending request, then aborts the connection."""
        if self._short is not None:
            self._forget(self._short)
        super().abort()

    def close_with_error(self, error: QkvError) -> None:
        """Responds to the pending request first, then closes with the error."""
        self.answer()
        self._take_long_way()
        self._stop_receiver()
        self._is_idle = False
        super().close_with_error(error)

    def _encode_error(self, error: QkvError, *more: Header) -> bytes:
        """Records the error here if the application never sees the request, else in its state."""
        headers: Iterable[Header] = ()
        url = b""
        if self._reading != NOTHING:  # else they are those of the request before
            headers = self.scope["headers"] if self._reading == BODY else self.headers or ()
            url = self.url
        begun = self.scope["state"] if self._reading == BODY else {}
        id = begun.get(REQUEST_ID_STATE) or request_id_from(headers) or self._observer.new_id()
        written = super()._encode_error(error, *more, (REQUEST_ID_HEADER, id))
        protocol_error = ProtocolError(error, len(written.partition(b"\r\n\r\n")[2]))
        if self._reading == BODY and not self.pipeline:
            if not self.cycle.response_started:
                begun[PROTOCOL_ERROR_STATE] = protocol_error
        else:
            method = self.parser.get_method().decode() if url else "?"
            self._observer.record_protocol_error(
                method, path_of(url) if url else "", headers, id, protocol_error
            )
        return written

    def shutdown(self) -> None:
        """Keeps a connection with a pending request, which uvicorn would close."""
        self._take_long_way()
        super().shutdown()

    def _is_free(self) -> bool:
        """True if no response is pending or unread on this connection, and no drain has begun."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.flow.write_paused and not self._worker.shared_state.is_draining

    def _start(self) -> None:
        """Starts the ordinary path of uvicorn, with a faster one for the body."""
        super().on_headers_complete()
        self.scope["state"][BODY_READER_STATE] = partial(self._rest, self.cycle)
        self.scope["state"][REQUEST_ID_STATE] = (
            request_id_from(self.scope["headers"]) or self._observer.new_id()
        )
        if self._is_long:
            self.scope["state"][ACCEPTED_STATE] = True

    def _rest(self, cycle: RequestResponseCycle, buffer: memoryview) -> asyncio.Future[bool]:
        """Returns a `BodyReader` of the request of a cycle."""
        came, cycle.body = cycle.body, bytearray()
        buffer[: len(came)] = came
        done = self.loop.create_future()
        if cycle.disconnected or len(came) == len(buffer):
            done.set_result(not cycle.disconnected)
        else:
            self._fill(buffer[len(came) :], done)
            self.flow.resume_reading()
        return done

    def _fill(self, buffer: memoryview, done: asyncio.Future[bool] | None = None) -> None:
        self._body_receiver = BodyReceiver(self, buffer, done)
        self.transport.set_protocol(self._body_receiver)

    def on_bytes(self, count: int) -> None:
        """Counts received bytes of a body."""
        self._received_bytes += count
        self._observer.received(count)

    def on_complete(self) -> None:
        """Completes a body that no parser has seen."""
        self._body_receiver, self._is_behind = None, True
        self.transport.set_protocol(self)
        self.on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Parses data; first resets a parser that has not seen the last body."""
        if self._is_behind:
            self._is_behind = False
            self._reset_parser()
        super().data_received(data)

    def _stop_receiver(self) -> bytes:
        """Stops the body receiver; returns the received bytes that no parser has seen."""
        filling, self._body_receiver = self._body_receiver, None
        if filling is None:
            return b""
        filling.end(False)
        self.transport.set_protocol(self)
        return bytes(filling.received)

    def _take_long_way(self) -> None:
        """Gives the pending request, if any, to uvicorn."""
        if (short := self._short) is None:
            return
        self._forget(short)
        self._head = None  # what is known of it may be another's by now
        self._is_long = True
        if self._body_receiver is not None:
            short.chunks.pop()
        unseen = self._stop_receiver()
        if short.unparsed is not None:
            for piece in (short.unparsed, *short.chunks[1:]):
                self._parse(bytes(piece))
        else:
            self._start()
            for chunk in short.chunks:
                super().on_body(bytes(chunk))
            if short.is_whole:
                super().on_message_complete()
        if unseen:
            self._parse(unseen)
        self._is_long = False

    def _forget(self, short: PendingRequest) -> None:
        self._short = None
        if short.place is not None:
            short.place.release()
        self._worker.add_in_flight(-1)

    def _write(self, short: PendingRequest, reply: Reply) -> None:
        """Sends a response; updates metrics first, so that a client finds its response counted."""
        size, id = sum(map(len, reply.body)), short.id or self._observer.new_id()
        last = b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (id, size)
        first = self._ready_batch.first_lines(self.server_state.default_headers)
        head = b"".join((first, reply.lines, last))
        self._observer.record_fast_path(self.url, self.headers, id, short.since, reply, size)
        self._forget(short)
        if size > _JOINED:
            self.transport.writelines((head, *reply.body))
        else:
            self.transport.write(b"".join((head, *reply.body)))
        self._begin_idle()
        if len(self.connections) == 1:
            self._busy_poll.begin(self.loop)
