"""A request's body, read whole under the limits, and an answer's bytes."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.errors import Left, TooLarge, Unparseable, UnsupportedMediaType
from qkv.wire import Codec, for_accept, for_content_type
from qkv.wire.message import Message

__all__ = ["REST", "Outgoing", "Received", "Rest", "body", "elsewhere", "read"]

_T = TypeVar("_T")
Chunk = bytes | memoryview

REST: Final = "qkv.rest"
"""In a scope's state: a `Rest`, where the server has one."""

Rest = Callable[[memoryview], Awaitable[bool]]
"""Fills a buffer with all that is left of a body of a declared length, as it comes in: each piece
is copied once, and no task is woken for it. False: the caller left."""

_LARGE: Final = 1 << 18  # bytes; more is not parsed or written on the event loop
_ALIGNMENT: Final = 64
_PIECE: Final = 1 << 20  # bytes; packed bodies are fed and unpacked in such pieces
_EITHER_FORM: Final = zlib.MAX_WBITS | 32  # gzip's, or zlib's, which HTTP calls deflate


class Received(NamedTuple):
    """A request.

    Attributes:
        message: what it says.
        at: when its last byte came, by `time.perf_counter`.
        body: it came in this, unpacked,
        codec: by this.
        answer_in: how to answer it.
    """

    message: Message
    at: float
    body: bytes | memoryview
    codec: Codec
    answer_in: Codec


async def read(
    request: Request, group: str, limit: int, grow: Callable[[int], None] = lambda _: None
) -> Received:
    """Reads and decodes a body whose tensors stand under `group`; `grow` as `body` takes it.

    Raises:
        UnsupportedMediaType: no codec for its Content-Type, or none for its Content-Encoding.
        NotAcceptable: no codec for its Accept.
        TooLarge: it is larger than `limit`, by its Content-Length, by what came, or unpacked.
        Unparseable, InvalidContent: from the codec.
    """
    codec = for_content_type(request.headers.get("content-type"))
    answer_in = for_accept(", ".join(request.headers.getlist("accept")), codec)
    whole = await body(request, limit, codec.aligned_at, grow)
    at = time.perf_counter()
    message = await elsewhere(len(whole), lambda: codec.decode(whole, group))
    return Received(message, at, whole, codec, answer_in)


async def elsewhere(size: int, work: Callable[[], _T]) -> _T:
    """Does what is quick at once, and what handles many bytes in a thread of its own."""
    if size <= _LARGE:
        return work()
    return await asyncio.to_thread(work)


class Outgoing(Response):
    """An answer on its way out: tensors leave from their own buffers."""

    def __init__(
        self, chunks: Sequence[Chunk], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks = chunks
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        length = sum(len(chunk) for chunk in chunks)
        self.init_headers({"content-length": str(length)} | dict(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        *before, last = self._chunks
        for chunk in before:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": last})


async def body(
    request: Request,
    limit: int,
    aligned_at: Callable[[bytes], int | None],
    grow: Callable[[int], None] = lambda _: None,
) -> bytes | memoryview:
    """The body, unpacked where it came packed.

    Args:
        request: whose.
        limit: most bytes, as they come and unpacked.
        aligned_at: says of the first 8 bytes which byte should lie at an aligned address; None
            where it does not matter and `bytes` are wanted.
        grow: told of bytes that have come without having been declared, or were unpacked.

    Raises:
        UnsupportedMediaType: it is packed in a way that is not read here.
        TooLarge: it is larger than the limit.
        Unparseable: it is packed and cannot be unpacked.
        Left: the caller left before all had come.
    """
    codings = request.headers.getlist("content-encoding") or ["identity"]
    coding = ", ".join(codings).strip().lower()  # one line, or as if it were one
    if coding not in ("identity", "gzip", "deflate"):
        raise UnsupportedMediaType(
            f"Content-Encoding {coding!r:.60} is not read here; send gzip, deflate, or neither"
        )
    declared = request.headers.get("content-length")
    if declared is not None and int(declared) > limit:  # the server has seen that it is a number
        raise TooLarge(f"the body has {declared} bytes; at most {limit} are read", limit=limit)
    stream = _chunks(request.receive, limit, grow if declared is None else None)
    if coding != "identity":
        packed = b"".join([chunk async for chunk in stream])
        whole = await asyncio.to_thread(lambda: _placed(_unpacked(packed, limit), aligned_at))
        grow(len(whole))
        return whole
    head = b""
    async for chunk in stream:
        head += chunk
        if len(head) >= 8:
            break
    at = aligned_at(head[:8])
    if at is None or declared is None:
        return _placed([head, *[chunk async for chunk in stream]], aligned_at)
    buffer = _aligned(int(declared), at)
    buffer[: len(head)] = head
    filled = len(head)
    rest: Rest | None = request.scope.get("state", {}).get(REST)
    if rest is not None and filled < len(buffer):
        if not await rest(buffer[filled:]):
            raise Left("the caller left before its body had come")
        return buffer
    async for chunk in stream:
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return buffer[:filled]


async def _chunks(
    receive: Receive, limit: int, grow: Callable[[int], None] | None
) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Left("the caller left before its body had come")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes", limit=limit)
        if grow is not None:
            grow(len(chunk))
        if chunk:
            yield chunk


def _unpacked(packed: bytes, limit: int) -> list[bytes]:
    """What gzip or zlib packed, in pieces; never more than the limit, whatever it claims to become.

    In pieces, because zlib would join them, and hold all of it twice.
    """
    unpacker = zlib.decompressobj(_EITHER_FORM)
    pieces: list[bytes] = []
    size = fed = 0
    try:
        while fed < len(packed) and not unpacker.eof:
            part = packed[fed : fed + _PIECE]
            fed += len(part)
            while part and not unpacker.eof:
                pieces.append(unpacker.decompress(part, _PIECE))
                part = unpacker.unconsumed_tail
                size += len(pieces[-1])
                if size > limit:
                    raise TooLarge(f"the body unpacks to more than {limit} bytes", limit=limit)
    except zlib.error as error:
        raise Unparseable(f"the body cannot be unpacked: {error}") from None
    if not unpacker.eof:
        raise Unparseable("the packed body ends too early")
    if unpacker.unused_data or fed < len(packed):
        raise Unparseable("bytes follow the packed body")
    return pieces


def _placed(
    pieces: Sequence[bytes], aligned_at: Callable[[bytes], int | None]
) -> bytes | memoryview:
    """The pieces as one body, copied once."""
    head = b""
    for piece in pieces:
        head += piece[:8]
        if len(head) >= 8:
            break
    at = aligned_at(head[:8])
    if at is None:
        return b"".join(pieces)
    buffer = _aligned(sum(map(len, pieces)), at)
    filled = 0
    for piece in pieces:
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
    return buffer


def _aligned(size: int, at: int) -> memoryview:
    """A buffer whose byte `at` lies at a multiple of 64.

    Raises:
        TooLarge: there is no such memory.
    """
    try:
        room = np.empty(size + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise TooLarge(f"the body has {size} bytes, for which there is no memory") from None
    first = -(room.ctypes.data + at) % _ALIGNMENT
    return room[first : first + size].data
