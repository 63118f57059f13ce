"""A request's body, read whole under the limits, and an answer's bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request

from qkv.errors import Left, TooLarge, UnsupportedMediaType
from qkv.message import Message
from qkv.wire import json

__all__ = ["Received", "elsewhere", "read"]

_T = TypeVar("_T")

_LARGE: Final = 1 << 18  # bytes; more is not parsed or written on the event loop


class Received(NamedTuple):
    """A message and when its last byte came, on the clock of `time.perf_counter`."""

    message: Message
    at: float


async def read(request: Request, group: str, limit: int) -> Received:
    """Reads and decodes a body whose tensors stand under `group`.

    Raises:
        UnsupportedMediaType: no codec for its Content-Type.
        TooLarge: it is larger than `limit`, by its Content-Length or by what came.
        Unparseable, InvalidContent: from the codec.
    """
    media_type = request.headers.get("content-type", json.MEDIA_TYPE).partition(";")[0].strip()
    if media_type.lower() != json.MEDIA_TYPE:
        raise UnsupportedMediaType(
            f"Content-Type {media_type!r:.100} is not read here; send {json.MEDIA_TYPE}"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not read here")
    body = await _bytes(request, limit)
    at = time.perf_counter()
    message = await elsewhere(len(body), lambda: json.decode(body, group))
    return Received(message, at)


async def elsewhere(size: int, work: Callable[[], _T]) -> _T:
    """Does what is quick at once, and what handles many bytes in a thread of its own."""
    if size <= _LARGE:
        return work()
    return await asyncio.to_thread(work)


async def _bytes(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and int(declared) > limit:  # the server has checked that it is a number
        raise TooLarge(f"the body has {declared} bytes; at most {limit} are read", limit=limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body has more than {limit} bytes", limit=limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise Left("the caller left before its body had come") from None
    return b"".join(chunks)
