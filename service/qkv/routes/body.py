"""A request's body, read whole under the limits, and an answer's bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.errors import Left, TooLarge, UnsupportedMediaType
from qkv.message import Message
from qkv.wire import Codec, for_accept, for_content_type

__all__ = ["Outgoing", "Received", "elsewhere", "read"]

_T = TypeVar("_T")

_LARGE: Final = 1 << 18  # bytes; more is not parsed or written on the event loop
_ALIGNMENT: Final = 64


class Received(NamedTuple):
    """A message, when its last byte came by `time.perf_counter`, and how to answer it."""

    message: Message
    at: float
    answer_in: Codec


async def read(request: Request, group: str, limit: int) -> Received:
    """Reads and decodes a body whose tensors stand under `group`.

    Raises:
        UnsupportedMediaType: no codec for its Content-Type.
        NotAcceptable: no codec for its Accept.
        TooLarge: it is larger than `limit`, by its Content-Length or by what came.
        Unparseable, InvalidContent: from the codec.
    """
    codec = for_content_type(request.headers.get("content-type"))
    answer_in = for_accept(", ".join(request.headers.getlist("accept")), codec)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not read here")
    body = await _body(request, limit, codec)
    at = time.perf_counter()
    message = await elsewhere(len(body), lambda: codec.decode(body, group))
    return Received(message, at, answer_in)


async def elsewhere(size: int, work: Callable[[], _T]) -> _T:
    """Does what is quick at once, and what handles many bytes in a thread of its own."""
    if size <= _LARGE:
        return work()
    return await asyncio.to_thread(work)


class Outgoing(Response):
    """A message on its way out: tensors leave from their own buffers."""

    def __init__(
        self, codec: Codec, message: Message, group: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks = codec.encode(message, group)
        self.status_code = 200
        self.background = None
        self.media_type = codec.MEDIA_TYPE
        self.body = b""
        length = sum(len(chunk) for chunk in self._chunks)
        self.init_headers({"content-length": str(length)} | dict(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _body(request: Request, limit: int, codec: Codec) -> bytes | memoryview:
    """The body: bytes, or a buffer that lies as the codec wants it."""
    declared = request.headers.get("content-length")
    if declared is not None and int(declared) > limit:  # the server has seen that it is a number
        raise TooLarge(f"the body has {declared} bytes; at most {limit} are read", limit=limit)
    stream = _chunks(request, limit)
    head = b""
    async for chunk in stream:
        head += chunk
        if len(head) >= 8:
            break
    aligned_at = codec.aligned_at(head[:8])
    if aligned_at is None or declared is None:
        whole = b"".join([head, *[chunk async for chunk in stream]])
        if aligned_at is None:
            return whole
        buffer = _aligned(len(whole), aligned_at)
        buffer[:] = whole
        return buffer
    buffer = _aligned(int(declared), aligned_at)
    buffer[: len(head)] = head
    filled = len(head)
    async for chunk in stream:
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return buffer[:filled]


async def _chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body has more than {limit} bytes", limit=limit)
            yield chunk
    except ClientDisconnect:
        raise Left("the caller left before its body had come") from None


def _aligned(size: int, at: int) -> memoryview:
    """A buffer whose byte `at` lies at a multiple of 64."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    first = -(room.ctypes.data + at) % _ALIGNMENT
    return room[first : first + size].data
