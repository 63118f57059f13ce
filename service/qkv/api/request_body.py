"""Reads request bodies under the limits, and sends responses of tensors and of records."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.api.compressed_body import decompress, is_compressed
from qkv.api.request_record import Header, record
from qkv.engine.admission import AdmittedBody
from qkv.errors import ClientDisconnected, PayloadTooLarge, UnsupportedMediaType
from qkv.wire import Codec, for_accept, for_content_type, json
from qkv.wire import response as responses
from qkv.wire.message import Message

_T = TypeVar("_T")
Chunk = bytes | memoryview

_INLINE_BYTES: Final = 1 << 18  # the event loop parses and encodes no more at once
_JOINED_BYTES: Final = 1 << 16  # copied sooner than sent in pieces
_ALIGNMENT: Final = 64
_DISCONNECTED: Final = "the client disconnected during the body"
_HEAD_BYTES: Final = 8  # the bytes that `aligned_offset` needs


class ReceivedMessage(NamedTuple):
    """A decoded request.

    Attributes:
        message: its fields and tensors.
        received_at: time of its last byte, by `time.perf_counter`.
        size: bytes of its body.
        response_codec: the codec of the response.
        admission: counts the request; None: it is not counted.
    """

    message: Message
    received_at: float
    size: int
    response_codec: Codec
    admission: AdmittedBody | None

    def release(self) -> None:
        """Stops counting the request."""
        if self.admission is not None:
            self.admission.release()


async def read_message(
    request: Request, group: str, limit: int, admission: AdmittedBody
) -> ReceivedMessage:
    """Reads and decodes a body.

    Args:
        request: the request.
        group: the field of the tensors.
        limit: as for `read_body`.
        admission: grows with what the request did not declare.

    Raises:
        UnsupportedMediaType: the Content-Type or the Content-Encoding is not supported.
        NotAcceptable: no codec matches Accept.
        PayloadTooLarge: the body exceeds `limit`, as declared, received, or decompressed.
        MalformedRequest, InvalidContent: from the codec.
    """
    headers = record().headers
    codec = for_content_type(_text(headers.get(b"content-type")))
    response_codec = for_accept(_text(headers.get(b"accept")), codec)
    whole = await read_body(request, limit, codec.aligned_offset, admission.grow)
    received_at = time.perf_counter()
    message = await in_thread_if_large(len(whole), lambda: codec.decode(whole, group))
    return ReceivedMessage(message, received_at, len(whole), response_codec, admission)


def require_json(request: Request) -> None:
    """Checks that the body is JSON, which is the default Content-Type.

    Raises:
        UnsupportedMediaType: it is not.
    """
    given = request.headers.get("content-type", json.MEDIA_TYPE)
    content_type = given.partition(";")[0].strip().lower()
    if content_type != json.MEDIA_TYPE:
        raise UnsupportedMediaType(
            f"Content-Type is not supported: got {content_type!r:.100}, expected {json.MEDIA_TYPE}"
        )


async def in_thread_if_large(size: int, work: Callable[[], _T]) -> _T:
    """Runs `work` inline if it handles at most 256 KiB, otherwise in a worker thread."""
    if size <= _INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)


def record_response(record: responses.Response, status: int = 200) -> Response:
    """Returns a response of a record, as JSON."""
    return Response(record.to_json(), status, media_type=json.MEDIA_TYPE)


class TensorResponse(Response):
    """A response that is sent from the buffers of its tensors, without a copy."""

    def __init__(
        self, chunks: Sequence[Chunk], media_type: str, headers: Iterable[Header] = ()
    ) -> None:
        length = sum(map(len, chunks))
        self._chunks = chunks if length > _JOINED_BYTES else (b"".join(chunks),)
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [
            (b"content-length", b"%d" % length),
            (b"content-type", media_type.encode()),
            *headers,
        ]

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
    grow: Callable[[int], None] | None = None,
) -> bytes | memoryview:
    """Reads a body, and decompresses it if needed.

    Args:
        request: the request.
        limit: most bytes, as received and decompressed.
        aligned_offset: returns, for the first 8 bytes, the index of the byte that should have an
            aligned address; None if alignment does not matter, and the caller needs `bytes`.
        grow: called with the size of each part that was not declared, or was decompressed; its
            error ends the request. None: nothing counts them.

    Raises:
        UnsupportedMediaType: the Content-Encoding is not supported.
        PayloadTooLarge: the body exceeds the limit.
        MalformedRequest: the body cannot be decompressed.
        ClientDisconnected: the client disconnected during the body.
    """
    headers = record().headers
    has_coding = is_compressed(headers)
    declared = _declared_bytes(headers, limit)
    if declared is not None and not has_coding:
        return await _receive_declared(request.receive, declared, aligned_offset)
    chunks = _receive_chunks(request.receive, declared or limit, grow if declared is None else None)
    if has_coding:
        pieces = await decompress(chunks, limit, grow or _ignore)
    else:
        pieces = [chunk async for chunk in chunks]
    size = sum(map(len, pieces))
    return await in_thread_if_large(size, lambda: _join_aligned(pieces, aligned_offset))


def _declared_bytes(headers: Mapping[bytes, bytes], limit: int) -> int | None:
    """Returns the size of a body as its Content-Length has it; None: there is no such header.

    Raises:
        PayloadTooLarge: it exceeds the limit.
    """
    if (length := headers.get(b"content-length")) is None:
        return None
    declared = int(length)  # the server has checked that it is a number
    if declared > limit:
        raise PayloadTooLarge(
            f"the body is too large: got {declared} bytes, expected at most {limit}", limit=limit
        )
    return declared


def _ignore(_: int) -> None:
    """Counts nothing."""


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


async def _receive(receive: Receive) -> tuple[bytes, bool]:
    """Receives a part of a body; returns it, and True if more may follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected(_DISCONNECTED)
    part = message.get("body", b"")
    record().received_bytes += len(part)
    return part, message.get("more_body", False)


async def _receive_chunks(
    receive: Receive, limit: int, count: Callable[[int], None] | None
) -> AsyncGenerator[bytes, None]:
    """Yields the parts of a body."""
    size, more = 0, True
    while more:
        chunk, more = await _receive(receive)
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(
                f"the body is too large: got more than {limit} bytes", limit=limit
            )
        if count is not None:
            count(len(chunk))
        if chunk:
            yield chunk


async def _receive_declared(
    receive: Receive, size: int, aligned_offset: Callable[[bytes], int | None]
) -> bytes | memoryview:
    """Receives a body of a declared size into one buffer, so that it is in memory once.

    To iterate over `_receive_chunks` would take 4 % of a small attention.
    """
    part, more = await _receive(receive)
    while more and len(part) < _HEAD_BYTES:
        following, more = await _receive(receive)
        part += following
    if (at := aligned_offset(part[:_HEAD_BYTES])) is None:
        pieces = [part]
        while more:
            part, more = await _receive(receive)
            pieces.append(part)
        return await in_thread_if_large(size, lambda: b"".join(pieces))
    buffer, filled_bytes = _new_aligned_buffer(size, at), len(part)
    buffer[:filled_bytes] = part
    while more:
        part, more = await _receive(receive)
        buffer[filled_bytes : filled_bytes + len(part)] = part
        filled_bytes += len(part)
    return buffer


def _join_aligned(
    pieces: Sequence[bytes], aligned_offset: Callable[[bytes], int | None]
) -> bytes | memoryview:
    """Joins parts to one body; copies each byte once."""
    head = b""
    for piece in pieces:
        head += piece[:_HEAD_BYTES]
        if len(head) >= _HEAD_BYTES:
            break
    at = aligned_offset(head[:_HEAD_BYTES])
    if at is None:
        return b"".join(pieces)
    buffer = _new_aligned_buffer(sum(map(len, pieces)), at)
    filled_bytes = 0
    for piece in pieces:
        buffer[filled_bytes : filled_bytes + len(piece)] = piece
        filled_bytes += len(piece)
    return buffer


def _new_aligned_buffer(size: int, at: int) -> memoryview:
    """Returns a buffer whose byte `at` has an address that is a multiple of 64.

    Raises:
        PayloadTooLarge: out of memory.
    """
    try:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise PayloadTooLarge(f"the service is out of memory for a body of {size} bytes") from None
    # half the time of memory.ctypes.data
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.data))
    first = -(address + at) % _ALIGNMENT
    return memory.data[first : first + size]
