"""The protocol of the API's connections: request ids, counts, and bodies received into buffers.

uvicorn makes an `ApiProtocol` for each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from qkv.api.job_runner import DISCONNECT_STATE, TASKS_STATE
from qkv.api.observability import (
    PROTOCOL_ERROR_STATE,
    REQUEST_ID_HEADER,
    REQUEST_ID_STATE,
    Header,
    ProtocolError,
    RequestObserver,
    request_id_from,
    request_id_of,
)
from qkv.api.request_body import BODY_READER_STATE
from qkv.errors import QkvError
from qkv.server.body_receiver import BodyReceiver
from qkv.server.connection_timeouts import ConnectionTimeouts
from qkv.server.http_connection import BODY, NOTHING, LimitedHttpProtocol, path_of
from qkv.server.request_cycle import RequestCycle

__all__ = ["ApiProtocol"]


class _CycleReader:
    """The `BodyReader` of the request of a cycle."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: ApiProtocol, cycle: RequestCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def first_bytes(self) -> bytes:
        """The first received bytes that have not been read; all of a small body."""
        return self._cycle.chunks[0] if self._cycle.chunks else b""

    async def read_into(self, buffer: memoryview) -> bool:
        """Fills a buffer that is as long as the rest; returns False if the client disconnects."""
        size = 0
        for chunk in self._cycle.take_chunks():
            buffer[size : size + len(chunk)] = chunk
            size += len(chunk)
        if self._cycle.disconnected or size == len(buffer):
            return not self._cycle.disconnected
        return await self._protocol.read_rest(buffer[size:])


class ApiProtocol(LimitedHttpProtocol):
    """The HTTP/1.1 protocol of one connection of the API.

    Args:
        config, server_state, app_state, _loop: as uvicorn's protocols take them.
        timeouts, error_response, is_draining: as `LimitedHttpProtocol` takes them.
        observer: counts received bytes and requests that do not reach the application.
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
        observer: RequestObserver,
    ) -> None:
        super().__init__(
            config,
            server_state,
            app_state,
            _loop,
            timeouts=timeouts,
            error_response=error_response,
            is_draining=is_draining,
        )
        self._observer = observer
        self._body_receiver: BodyReceiver | None = None
        self._has_skipped_body = False  # the parser has not seen the last body

    def data_received(self, data: bytes) -> None:
        """Parses data; first resets a parser that has not seen the last body."""
        if self._has_skipped_body:
            self._has_skipped_body = False
            self._reset_parser()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        if not self.check_head():
            return
        super().on_headers_complete()
        scope: Any = self.scope
        state = scope["state"]
        state[TASKS_STATE] = self.tasks
        state[DISCONNECT_STATE] = self.cycle
        state[BODY_READER_STATE] = _CycleReader(self, self.cycle)
        state[REQUEST_ID_STATE] = request_id_of(scope) or self._observer.new_id()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._observer.received(len(body))
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._body_receiver is not None:
            self._body_receiver.end(False)
            self._body_receiver = None
        super().connection_lost(exc)

    def close_with_error(self, error: QkvError) -> None:
        """Stops a body receiver, then closes the connection with an error response."""
        receiver, self._body_receiver = self._body_receiver, None
        if receiver is not None:
            receiver.end(False)
            self.transport.set_protocol(self)
        super().close_with_error(error)

    def _encode_error(self, error: QkvError, *more: Header) -> bytes:
        """Records the error here if the application never sees the request, else in its state."""
        headers: Iterable[Header] = ()
        url = b""
        if self._reading != NOTHING:  # else they are those of the request before
            headers = self.scope["headers"] if self._reading == BODY else self.headers or ()
            url = self.url
        state = self.scope["state"] if self._reading == BODY else {}
        id = state.get(REQUEST_ID_STATE) or request_id_from(headers) or self._observer.new_id()
        response = super()._encode_error(error, *more, (REQUEST_ID_HEADER, id))
        protocol_error = ProtocolError(error, len(response.partition(b"\r\n\r\n")[2]))
        if self._reading == BODY and not self.queued_cycles:
            if not self.cycle.response_started:
                state[PROTOCOL_ERROR_STATE] = protocol_error
        else:
            method = self.parser.get_method().decode() if url else "?"
            self._observer.record_protocol_error(
                method, path_of(url) if url else "", headers, id, protocol_error
            )
        return response

    async def read_rest(self, buffer: memoryview) -> bool:
        """Fills a buffer with the rest of a body; returns False if the client disconnects."""
        done: asyncio.Future[bool] = self.loop.create_future()
        self._body_receiver = BodyReceiver(self, buffer, done)
        self.transport.set_protocol(self._body_receiver)
        self.flow.resume_reading()
        return await done

    def on_bytes(self, count: int) -> None:
        """Counts received bytes of a body."""
        self._received_bytes += count
        self._observer.received(count)

    def on_complete(self) -> None:
        """Completes a body that the parser has not seen."""
        self._body_receiver, self._has_skipped_body = None, True
        self.transport.set_protocol(self)
        self.on_message_complete()
