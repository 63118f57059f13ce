"""Responses of server-sent events (WHATWG HTML, section 9.2).

The endpoint of sweeps returns an `EventStreamResponse`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.api.job_runner import until_disconnect
from qkv.api.request_record import record, record_error
from qkv.errors import ClientDisconnected, Internal, QkvError, stopping
from qkv.wire import response as responses
from qkv.wire.responses import Stopped

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "text/event-stream"
HEARTBEAT_S: Final = 10.0
"""Seconds without an event until a comment is sent: proxies close idle connections."""
_HEARTBEAT: Final = b": still at work\n\n"
_HEADERS: Final = (
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
)

Event = tuple[str, responses.Response]
"""The name of an event, and its data."""


class EventStreamResponse(Response):
    """A response of events until the generator ends or the client disconnects, which cancels it."""

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        # init_headers would set Content-Length
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch = asyncio.create_task(until_disconnect(receive))
        try:
            while (event := await self._next(watch, send)) is not None:
                await _send_chunk(send, _encode(event))
        except asyncio.CancelledError:  # the drain has timed out
            await _send_chunk(send, _encode(error_event(stopping())))
        finally:
            watch.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, watch: asyncio.Task[None], send: Send) -> Event | None:
        """Returns the next event; None if there is none, or the client has disconnected."""
        next_event = asyncio.create_task(_next_or_none(self._events))
        try:
            while not await _first_done(next_event, watch):
                await _send_chunk(send, _HEARTBEAT)
            if not next_event.done():
                record_error(ClientDisconnected("the client disconnected before the last event"))
                return None
            return next_event.result()
        except Exception as error:  # the status has been sent: the error becomes an event
            _log.error("a stream of events failed (%s)", record().id_text, exc_info=error)
            return error_event(
                Internal("internal error; it was logged with the id in X-Request-ID")
            )
        finally:
            next_event.cancel()
            await asyncio.wait((next_event,))  # until the generator has released its resources


def error_event(error: QkvError) -> Event:
    """Returns the last event of a stream that has failed."""
    record_error(error)
    return "error", Stopped(problem=error.problem())


async def _next_or_none(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _first_done(*tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """Returns the tasks that end first; none if a heartbeat is due before."""
    done, _ = await asyncio.wait(tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
    return done


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _encode(event: Event) -> bytes:
    name, data = event
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data.to_json())
