"""Reads the events of a response as they arrive (server-sent events), with httpx-sse.

The clients use `iter_events` and `aiter_events` for sweeps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Final

import httpx
from httpx_sse import EventSource, ServerSentEvent

from qkv.client.response_errors import media_type, unreadable

__all__ = ["EVENT_STREAM", "ServerSentEvent", "aiter_events", "iter_events"]

EVENT_STREAM: Final = "text/event-stream"


def iter_events(response: httpx.Response) -> Generator[ServerSentEvent]:
    """Yields the events of a response.

    Raises:
        MalformedRequest: the response is not an event stream.
        httpx.TransportError: the connection broke.
    """
    for event in _open(response).iter_sse():
        if event.data:  # WHATWG HTML, section 9.2.6: without data there is no event
            yield event


async def aiter_events(response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
    """Does the same as `iter_events` in asyncio."""
    async with aclosing(_open(response).aiter_sse()) as events:
        async for event in events:
            if event.data:
                yield event


def _open(response: httpx.Response) -> EventSource:
    if media_type(response) != EVENT_STREAM:
        raise unreadable(response, EVENT_STREAM)
    # an event stream is UTF-8 and may begin with a byte order mark (section 9.2.5)
    response.encoding = "utf-8-sig"
    return EventSource(response)
