"""The head of a request: its limits and rules beyond those of the parser, and its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import httptools

from qkv.api.server_request import Header
from qkv.errors import HeadersTooLarge, MalformedRequest, UnsupportedTransferCoding

__all__ = ["check_head", "check_size", "path_of", "with_path", "without_upgrade"]

_MAX_HEADERS: Final = 100
_MAX_HEAD_BYTES: Final = 1 << 16  # URL, and names and values of headers


def check_size(header_count: int, size: int) -> None:
    """Checks the received part of a head, or of the trailers behind a body.

    Args:
        header_count: headers or trailers so far.
        size: bytes of the URL, and of their names and values.

    Raises:
        HeadersTooLarge: it is too large.
    """
    if header_count > _MAX_HEADERS:
        raise HeadersTooLarge(
            "the request has too many headers or trailers: "
            f"got {header_count} or more, expected at most {_MAX_HEADERS}"
        )
    if size > _MAX_HEAD_BYTES:
        raise HeadersTooLarge(
            f"the request's head is too large: got {size} bytes or more, "
            f"expected at most {_MAX_HEAD_BYTES}"
        )


def check_head(headers: Sequence[Header], by_name: Mapping[bytes, bytes], version: str) -> None:
    """Checks a complete head.

    Args:
        headers: all headers, their names in lower case.
        by_name: the same, with the values of a name joined.
        version: of HTTP.

    Raises:
        MalformedRequest, UnsupportedTransferCoding: the head is rejected.
    """
    count = len(headers)
    if version not in ("1.1", "1.0"):
        raise MalformedRequest(f"the version of HTTP is not supported: got {version}, expected 1.1")
    hosts = int(b"host" in by_name)
    if count > len(by_name):  # a name comes more than once
        hosts = [name for name, _ in headers].count(b"host")
    if hosts != 1 and (hosts or version == "1.1"):
        raise MalformedRequest(f"the request needs one Host header: got {hosts}")
    coding = by_name.get(b"transfer-encoding", b"chunked")
    if coding.strip().lower() != b"chunked":  # RFC 9112, section 6.1
        raise UnsupportedTransferCoding(
            "Transfer-Encoding is not supported: "
            f"got {coding.decode('latin-1')!r:.60}, expected chunked"
        )


def without_upgrade(method: bytes, url: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """Returns a head without its request for another protocol (RFC 9110, section 7.8)."""
    kept = [h for h in headers if h[0] not in (b"upgrade", b"connection")]
    named = b",".join([value for name, value in headers if name == b"connection"])
    if b"close" in [token.strip().lower() for token in named.split(b",")]:
        kept.append((b"connection", b"close"))
    lines = b"".join([b"%b: %b\r\n" % header for header in kept])
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), lines)


def path_of(url: bytes) -> str:
    """Returns the path of a request target, or of its received part."""
    if not url.startswith(b"/"):
        with suppress(httptools.HttpParserError):
            url = httptools.parse_url(url).path or b"/"
    return url.partition(b"?")[0].decode("ascii", "replace")


def with_path(url: bytes) -> bytes:
    """Returns an absolute-form target with a path; without one "/" (RFC 9110, section 4.2.3)."""
    parsed = httptools.parse_url(url)
    if parsed.path:
        return url
    return b"/" if parsed.query is None else b"/?%b" % parsed.query
