"""Request bodies, read whole under the limits, and responses of tensors.

Endpoints call `read_message` or `read_body`, and return a `TensorResponse`.
"""

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

from qkv.errors import ClientDisconnected, MalformedRequest, PayloadTooLarge, UnsupportedMediaType
from qkv.wire import Codec, for_accept, for_content_type
from qkv.wire.message import Message

__all__ = [
    "BODY_READER_STATE",
    "BodyReader",
    "ReceivedMessage",
    "TensorResponse",
    "in_thread_if_large",
    "read_body",
    "read_message",
]

_T = TypeVar("_T")
Chunk = bytes | memoryview

BODY_READER_STATE: Final = "qkv.body_reader"
"""Key of a scope's state: a `BodyReader`, if the server has one."""

BodyReader = Callable[[memoryview], Awaitable[bool]]
"""Receives the rest of a body of a declared length into a buffer: each piece is copied once, and
wakes no task. False: the client disconnected."""

_INLINE_BYTES: Final = 1 << 18  # more is not parsed or encoded on the event loop
_ALIGNMENT: Final = 64
_DECOMPRESS_CHUNK_BYTES: Final = 1 << 20
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32  # HTTP calls zlib's format deflate


class ReceivedMessage(NamedTuple):
    """A decoded request.

    Attributes:
        message: its fields and tensors.
        received_at: when its last byte was received, by `time.perf_counter`.
        body: its bytes, decompressed.
        codec: that decoded it.
        response_codec: that encodes the response.
    """

    message: Message
    received_at: float
    body: bytes | memoryview
    codec: Codec
    response_codec: Codec


async def read_message(
    request: Request, group: str, limit: int, grow: Callable[[int], None] = lambda _: None
) -> ReceivedMessage:
    """Reads and decodes a body whose tensors stand under `group`; `grow` as `read_body` takes it.

    Raises:
        UnsupportedMediaType: no codec for its Content-Type, or none for its Content-Encoding.
        NotAcceptable: no codec for its Accept.
        PayloadTooLarge: it is larger than `limit`: as declared, received, or decompressed.
        MalformedRequest, InvalidContent: from the codec.
    """
    codec = for_content_type(request.headers.get("content-type"))
    response_codec = for_accept(", ".join(request.headers.getlist("accept")), codec)
    whole = await read_body(request, limit, codec.aligned_offset, grow)
    received_at = time.perf_counter()
    message = await in_thread_if_large(len(whole), lambda: codec.decode(whole, group))
    return ReceivedMessage(message, received_at, whole, codec, response_codec)


async def in_thread_if_large(size: int, work: Callable[[], _T]) -> _T:
    """Runs `work` inline if it handles at most 256 KiB, otherwise in a worker thread."""
    if size <= _INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)


class TensorResponse(Response):
    """A response that is sent from the tensors' own buffers, without a copy."""

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


async def read_body(
    request: Request,
    limit: int,
    aligned_offset: Callable[[bytes], int | None],
    grow: Callable[[int], None] = lambda _: None,
) -> bytes | memoryview:
    """Reads the body, and decompresses it if needed.

    Args:
        request: whose body it is.
        limit: in bytes, both as received and decompressed.
        aligned_at: returns, given the first 8 bytes, which byte should lie at an aligned address;
            None where it does not matter, and `bytes` are wanted.
        grow: called with the count of bytes that were not declared, or were decompressed.

    Raises:
        UnsupportedMediaType: its Content-Encoding is not supported.
        PayloadTooLarge: it is larger than the limit.
        MalformedRequest: it cannot be decompressed.
        ClientDisconnected: the client left before all of it was received.
    """
    encodings = request.headers.getlist("content-encoding") or ["identity"]
    encoding = ", ".join(encodings).strip().lower()  # one line, or as if it were one
    if encoding not in ("identity", "gzip", "deflate"):
        raise UnsupportedMediaType(
            f"Content-Encoding {encoding!r:.60} is not read here; send gzip, deflate, or neither"
        )
    declared = request.headers.get("content-length")
    if declared is not None and int(declared) > limit:  # a number: the server has checked
        raise PayloadTooLarge(
            f"the body has {declared} bytes; at most {limit} are read", limit=limit
        )
    stream = _receive_chunks(request.receive, limit, grow if declared is None else None)
    if encoding != "identity":
        compressed = b"".join([chunk async for chunk in stream])
        whole = await asyncio.to_thread(
            lambda: _join_aligned(_decompress(compressed, limit), aligned_offset)
        )
        grow(len(whole))
        return whole
    head = b""
    async for chunk in stream:
        head += chunk
        if len(head) >= 8:
            break
    at = aligned_offset(head[:8])
    if at is None or declared is None:
        return _join_aligned([head, *[chunk async for chunk in stream]], aligned_offset)
    buffer = _new_aligned_buffer(int(declared), at)
    buffer[: len(head)] = head
    filled_bytes = len(head)
    read_rest: BodyReader | None = request.scope.get("state", {}).get(BODY_READER_STATE)
    if read_rest is not None and filled_bytes < len(buffer):
        if not await read_rest(buffer[filled_bytes:]):
            raise ClientDisconnected("the caller left before its body had come")
        return buffer
    async for chunk in stream:
        buffer[filled_bytes : filled_bytes + len(chunk)] = chunk
        filled_bytes += len(chunk)
    return buffer[:filled_bytes]


async def _receive_chunks(
    receive: Receive, limit: int, grow: Callable[[int], None] | None
) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the caller left before its body had come")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(f"the body has more than {limit} bytes", limit=limit)
        if grow is not None:
            grow(len(chunk))
        if chunk:
            yield chunk


def _decompress(compressed: bytes, limit: int) -> list[bytes]:
    """Decompresses gzip or zlib, up to the limit.

    Returns pieces, because zlib would join them, and hold all of it twice.
    """
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    pieces: list[bytes] = []
    size = read_bytes = 0
    try:
        while read_bytes < len(compressed) and not decompressor.eof:
            part = compressed[read_bytes : read_bytes + _DECOMPRESS_CHUNK_BYTES]
            read_bytes += len(part)
            while part and not decompressor.eof:
                pieces.append(decompressor.decompress(part, _DECOMPRESS_CHUNK_BYTES))
                part = decompressor.unconsumed_tail
                size += len(pieces[-1])
                if size > limit:
                    raise PayloadTooLarge(
                        f"the body unpacks to more than {limit} bytes", limit=limit
                    )
    except zlib.error as error:
        raise MalformedRequest(f"the body cannot be unpacked: {error}") from None
    if not decompressor.eof:
        raise MalformedRequest("the packed body ends too early")
    if decompressor.unused_data or read_bytes < len(compressed):
        raise MalformedRequest("bytes follow the packed body")
    return pieces


def _join_aligned(
    pieces: Sequence[bytes], aligned_offset: Callable[[bytes], int | None]
) -> bytes | memoryview:
    """Joins pieces to one body, copied once."""
    head = b""
    for piece in pieces:
        head += piece[:8]
        if len(head) >= 8:
            break
    at = aligned_offset(head[:8])
    if at is None:
        return b"".join(pieces)
    buffer = _new_aligned_buffer(sum(map(len, pieces)), at)
    filled_bytes = 0
    for piece in pieces:
        buffer[filled_bytes : filled_bytes + len(piece)] = piece
        filled_bytes += len(piece)
    return buffer


def _new_aligned_buffer(size: int, at: int) -> memoryview:
    """Returns a buffer whose byte `at` lies at a multiple of 64.

    Raises:
        PayloadTooLarge: out of memory.
    """
    try:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise PayloadTooLarge(f"the body has {size} bytes, for which there is no memory") from None
    first = -(memory.ctypes.data + at) % _ALIGNMENT
    return memory[first : first + size].data
