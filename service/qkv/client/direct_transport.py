"""Requests of the clients on httpx's transport, without the layers of `httpx.Client` above it.

`Client.send` and `AsyncClient.send` use `RequestTemplates`, and call the transport of their httpx
client. Cookies, redirects and authentication flows, which the service does not need, take `httpx`
longer than a small attention.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final

import httpx

from qkv.client.request_builders import RequestSpec

__all__ = ["RequestTemplates", "ssl_context", "transport_of"]

_MAX_TEMPLATES: Final = 256  # one for each path
_PIECE_BYTES: Final = 1 << 20


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that is sent a piece at a time, without a copy of the whole.

    httpcore copies what is left of a piece after each `send`, which takes about 2 MB: that was 2 GB
    for a body of 100 MB in one piece, and half a second.
    """

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            for start in range(0, len(chunk), _PIECE_BYTES):
                yield bytes(memoryview(chunk)[start : start + _PIECE_BYTES])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


class RequestTemplates:
    """Requests by path: URL and headers are built once, then only content and its length.

    Args:
        http: the httpx client, with the service's URL, the headers and the timeouts.
    """

    def __init__(self, http: httpx.Client | httpx.AsyncClient) -> None:
        self._http = http
        self._templates: dict[tuple[str, str, tuple[str, ...]], httpx.Request] = {}

    def build(self, spec: RequestSpec[Any]) -> httpx.Request:
        """Returns the request of a specification.

        Raises:
            RuntimeError: the client is closed.
        """
        if self._http.is_closed:
            raise RuntimeError("the client is closed")
        key = spec.method, spec.path, tuple(spec.headers.values())
        if (template := self._templates.get(key)) is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._build_template(spec)
        request = partial(
            httpx.Request, template.method, template.url, extensions=template.extensions
        )
        size = sum(map(len, spec.chunks))
        if size <= _PIECE_BYTES:
            return request(headers=template.headers, content=spec.content)
        headers = template.headers.copy()
        headers["Content-Length"] = str(size)
        return request(headers=headers, stream=_Pieces(spec.chunks))

    def _build_template(self, spec: RequestSpec[Any]) -> httpx.Request:
        template = self._http.build_request(spec.method, spec.path, headers=spec.headers)
        template.headers.pop("content-length", None)  # that of an empty POST
        if template.url.userinfo:  # as httpx.Client.send does
            auth = httpx.BasicAuth(template.url.username, template.url.password)
            template = next(auth.sync_auth_flow(template))
        return template


def transport_of(http: httpx.Client | httpx.AsyncClient) -> Any:
    """Returns the transport of an httpx client for its base URL: direct, or to a proxy.

    The member is not documented. The only other way is to select proxies from the environment anew.
    """
    return http._transport_for_url(http.base_url)


@cache
def ssl_context() -> ssl.SSLContext:
    """Returns the TLS context of all clients: making one takes longer than all else in a client."""
    return httpx.create_ssl_context()
