"""Requests of the clients on httpx's transports, without the layers of `httpx.Client` above them.

Cookies, redirects and authentication flows, which the service does not need, and the pool of
`httpx.AsyncClient`, which visits all its connections several times for each request, take longer
than a small attention. At S, a client needs 0.85 of plain httpx's processor time for a request on
one connection, and with 16 tasks 0.44, and handles about twice as many requests. Limits of the pool
change nothing about this.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final
from urllib.request import getproxies, proxy_bypass

import httpx

from qkv.client.request_builders import RequestSpec

_MAX_TEMPLATES: Final = 256  # one for each path
_PIECE_BYTES: Final = 1 << 20
# httpx's defaults
_MAX_CONNECTIONS: Final = 100
_MAX_IDLE: Final = 20


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


def new_transport(url: str) -> httpx.HTTPTransport:
    """Returns a transport to a service, through the proxy that the environment names for it.

    Raises:
        ValueError, ImportError: the address of the proxy is wrong, or httpx lacks its protocol.
    """
    return httpx.HTTPTransport(verify=_ssl_context(), proxy=_proxy_of(url))


def new_async_transport(url: str) -> httpx.AsyncHTTPTransport:
    """As `new_transport`, for asyncio."""
    return httpx.AsyncHTTPTransport(verify=_ssl_context(), proxy=_proxy_of(url))


class AsyncConnections(httpx.AsyncBaseTransport):
    """A transport with one of httpx's for each connection, which serves one request at a time.

    Args:
        url: of the service.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # the last used is the first to be used again
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the response to a request, with its body.

        Raises:
            httpx.PoolTimeout: all connections are in use for too long.
            httpx.TransportError: the connection broke or timed out.
        """
        if self._free.locked():
            await self._wait_until_free(request)
        else:
            await self._free.acquire()
        transport = self._idle.pop() if self._idle else new_async_transport(self._url)
        try:
            response = await transport.handle_async_request(request)
            response.request = request
            await response.aread()
            return response
        finally:
            self._free.release()
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(transport)
            else:
                await transport.aclose()

    async def _wait_until_free(self, request: httpx.Request) -> None:
        try:
            async with asyncio.timeout(request.extensions["timeout"]["pool"]):
                await self._free.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout("all connections are in use", request=request) from None

    async def aclose(self) -> None:
        """Closes the connections that are not in use."""
        while self._idle:
            await self._idle.pop().aclose()


def _proxy_of(url: str) -> str | None:
    """Returns the proxy that the environment names for a URL, as httpx finds it; None: none."""
    host = httpx.URL(url)
    proxies = getproxies()
    proxy = proxies.get(host.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(host.netloc.decode("ascii")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@cache
def _ssl_context() -> ssl.SSLContext:
    """Returns the TLS context of all clients: making one takes longer than all else in a client."""
    return httpx.create_ssl_context()
