"""The head of a request: bounded while it arrives, and checked beyond what a parser checks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import httptools

from qkv.errors import HeadersTooLarge, MalformedRequest, UnsupportedTransferCoding

MAX_HEADERS: Final = 100
"""Headers of a request, or trailers of its body."""
MAX_HEAD_BYTES: Final = 1 << 16
"""Bytes of the target and of all names and values of headers, or of trailers."""
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


class RequestHead:
    """The head of a request. The trailers of a body are one too: they have the same bounds.

    Attributes:
        target: of the request.
        headers: names in lower case, and values.
    """

    __slots__ = ("headers", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def check_bounds(self) -> None:
        """Checks the bounds of what has arrived.

        Raises:
            HeadersTooLarge: there are too many headers, or the head is too large.
        """
        if len(self.headers) > MAX_HEADERS:
            raise HeadersTooLarge(
                "the request has too many headers or trailers: "
                f"got {MAX_HEADERS + 1} or more, expected at most {MAX_HEADERS}"
            )
        if len(self.target) + sum([len(n) + len(v) for n, v in self.headers]) > MAX_HEAD_BYTES:
            raise self.too_large()

    @staticmethod
    def too_large() -> HeadersTooLarge:
        """Returns the error of a head with too many bytes."""
        return HeadersTooLarge(
            f"the request's head is too large: got more than {MAX_HEAD_BYTES} bytes, "
            f"expected at most {MAX_HEAD_BYTES}"
        )

    def check(self, version: str) -> dict[bytes, bytes]:
        """Checks a complete head; returns the last value of each name.

        Args:
            version: of HTTP.

        Raises:
            MalformedRequest, UnsupportedTransferCoding: the head is rejected.
        """
        if version not in ("1.1", "1.0"):
            raise MalformedRequest(
                f"the version of HTTP is not supported: got {version}, expected 1.1"
            )
        by_name = dict(self.headers)
        hosts = int(b"host" in by_name)
        if len(by_name) < len(self.headers):  # a name comes more than once
            hosts = len(self._values(b"host"))
        if hosts != 1 and (hosts or version == "1.1"):
            raise MalformedRequest(f"the request needs one Host header: got {hosts}")
        if b"transfer-encoding" in by_name:
            coding = b", ".join(self._values(b"transfer-encoding"))
            if coding.strip().lower() != b"chunked":  # RFC 9112, section 6.1
                raise UnsupportedTransferCoding(
                    "Transfer-Encoding is not supported: "
                    f"got {coding.decode('latin-1')!r:.60}, expected chunked"
                )
        return by_name

    def _values(self, name: bytes) -> list[bytes]:
        return [value for each, value in self.headers if each == name]

    def scope(self, method: str, version: str) -> dict[str, Any]:
        """Returns the part of an ASGI scope that a complete head gives.

        The host of an absolute target has the place of the header Host (RFC 9112, section 3.2.2).

        Raises:
            httptools.HttpParserError: the target is malformed.
        """
        url = httptools.parse_url(self.target)
        path = url.path or b"/"  # RFC 9110, section 4.2.3
        if url.host is not None:
            port = b"" if url.port is None else b":%d" % url.port
            host = b"[%b]" % url.host if b":" in url.host else url.host  # IPv6
            kept = [header for header in self.headers if header[0] != b"host"]
            self.headers = [(b"host", host + port), *kept]
        text = path.decode("ascii")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "scheme": "http",
            "root_path": "",
            "method": method,
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": url.query or b"",
            "headers": self.headers,
        }

    def scope_of_part(self, method: str) -> dict[str, Any]:
        """Returns the same of a head that is incomplete or malformed, as far as it is known."""
        url = self.target
        if not url.startswith(b"/"):
            with suppress(httptools.HttpParserError):
                url = httptools.parse_url(url).path or b"/"
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("ascii", "replace")
        names = {"method": method, "path": unquote(path), "raw_path": raw_path}
        fixed = {"type": "http", "asgi": _ASGI, "http_version": "1.1", "scheme": "http"}
        return {**fixed, "root_path": "", **names, "query_string": query, "headers": self.headers}

    def without_upgrade(self, method: bytes, version: str) -> bytes:
        """Returns the bytes of the head without its request for another protocol.

        Java's HttpClient asks for HTTP/2 in each first request, and is served HTTP/1.1 then
        (RFC 9110, section 7.8).
        """
        kept = [h for h in self.headers if h[0] not in (b"upgrade", b"connection")]
        named = b",".join(self._values(b"connection"))
        if b"close" in [token.strip().lower() for token in named.split(b",")]:
            kept.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in kept])
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.target, version.encode(), lines)
