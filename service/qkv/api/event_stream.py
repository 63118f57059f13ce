"""Server-sent events: an answer that says what it knows as soon as it does (WHATWG, HTML 9.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.api.job_runner import left
from qkv.api.observability import fails, request_id
from qkv.errors import Internal, Left, NotNow, QkvError
from qkv.wire import json

__all__ = ["HEARTBEAT_S", "MEDIA_TYPE", "Event", "Events", "failed"]

_log = logging.getLogger("qkv.app")

MEDIA_TYPE: Final = "text/event-stream"
HEARTBEAT_S: Final = 10.0
"""Seconds of silence after which a comment is sent: whatever lies between takes a silent
connection for a dead one."""
_HEARTBEAT: Final = b": still at work\n\n"
_HEADERS: Final = (
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # what stands in front is not to collect them
)

Event = tuple[str, Any]
"""Its name, and what it says, as plain JSON."""


class Events(Response):
    """Sends events as they come, until there are none or the caller leaves; then the generator is
    cancelled where it waits."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        # not by init_headers, which says how long the body is
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        leaving = asyncio.ensure_future(left(Request(scope, receive)))
        try:
            while (event := await self._next(leaving, send)) is not None:
                await _say(send, _written(event))
        except asyncio.CancelledError:  # the service ends, and has waited for as long as it may
            stopping = NotNow("the service is stopping", retry_after=5)
            await _say(send, _written(failed(stopping)))
        finally:
            leaving.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, leaving: asyncio.Future[None], send: Send) -> Event | None:
        """The next event; None where there is none, or nobody to hear it."""
        coming = asyncio.ensure_future(_first(self._events))
        either = (coming, leaving)
        try:
            while not coming.done():
                await asyncio.wait(either, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    fails(Left("the caller left before all had been said"))
                    return None
                if not coming.done():
                    await _say(send, _HEARTBEAT)
            return coming.result()
        except Exception as error:  # the status has gone out: all that is left is to say so
            _log.error("a stream of events failed (%s)", request_id(), exc_info=error)
            return failed(Internal("this is a fault of the service, and is logged"))
        finally:
            coming.cancel()
            await asyncio.wait((coming,))  # until it has let go of all it held


def failed(error: QkvError) -> Event:
    """What ends a stream before its time."""
    fails(error)
    return "error", {"problem": error.problem()}


async def _first(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _say(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _written(event: Event) -> bytes:
    name, said = event
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dump(said))
