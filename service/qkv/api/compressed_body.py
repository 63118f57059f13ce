"""Compressed request bodies: recognises their coding, and decompresses them under the limits.

`request_body.read_body` calls these functions.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from qkv.errors import MalformedRequest, PayloadTooLarge, UnsupportedMediaType

_PIECE_BYTES: Final = 1 << 20
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32  # "deflate" in HTTP is the format of zlib


def is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    """True if a body is compressed with gzip or deflate.

    Raises:
        UnsupportedMediaType: the Content-Encoding is not supported.
    """
    if (value := headers.get(b"content-encoding")) is None:
        return False
    encoding = value.decode("latin-1").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise UnsupportedMediaType(
            f"Content-Encoding is not supported: got {encoding!r:.60}, expected gzip, deflate, or "
            "no such header"
        )
    return encoding != "identity"


async def decompress(
    chunks: AsyncIterator[bytes], limit: int, grow: Callable[[int], None]
) -> list[bytes]:
    """Decompresses gzip or zlib while it is received.

    A request holds at most one piece of 1 MiB that is not counted yet: 60 KB of gzip may have
    60 MiB.

    Args:
        chunks: the parts of the compressed body.
        limit: most decompressed bytes.
        grow: called with the size of each decompressed piece; its error ends the request.

    Returns:
        The pieces: zlib would join them, and hold all bytes twice.

    Raises:
        PayloadTooLarge: the decompressed body exceeds the limit.
        MalformedRequest: the body cannot be decompressed.
    """
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    pieces: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            rest = chunk
            while rest and not decompressor.eof:
                pieces.append(await asyncio.to_thread(decompressor.decompress, rest, _PIECE_BYTES))
                rest = decompressor.unconsumed_tail
                size += len(pieces[-1])
                if size > limit:
                    raise PayloadTooLarge(
                        f"the decompressed body is too large: got more than {limit} bytes",
                        limit=limit,
                    )
                grow(len(pieces[-1]))
            if rest or decompressor.unused_data:
                raise MalformedRequest("bytes follow the compressed body")
    except zlib.error as error:
        raise MalformedRequest(f"the body cannot be decompressed: {error}") from None
    if not decompressor.eof:
        raise MalformedRequest("the compressed body ends too early")
    return pieces
