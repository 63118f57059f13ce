"""The connections of an `AsyncClient`: an httpx client with one connection for each.

httpx's pool visits all its connections several times for each request, and lets requests compete
for one that is free. With 16 tasks that takes longer than the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import httpx

from qkv.client.direct_transport import transport_of

__all__ = ["AsyncConnections"]

# httpx's defaults
_MAX_CONNECTIONS: Final = 100
_MAX_IDLE: Final = 20


class AsyncConnections:
    """Connections of which each serves one request at a time.

    Args:
        new_http: creates an httpx client with the URL and options of the service.
    """

    def __init__(self, new_http: Callable[[], httpx.AsyncClient]) -> None:
        self._new_http = new_http
        self._idle: list[httpx.AsyncClient] = []  # the last used is the first to be used again
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def exchange(self, request: httpx.Request) -> httpx.Response:
        """Returns the response to a request, with its body.

        Raises:
            httpx.PoolTimeout: all connections are in use for too long.
            httpx.TransportError: the connection broke or timed out.
        """
        if self._free.locked():
            await self._wait_until_free(request)
        else:
            await self._free.acquire()
        http = self._idle.pop() if self._idle else self._new_http()
        try:
            return await exchange(transport_of(http), request)
        finally:
            self._free.release()
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(http)
            else:
                await http.aclose()

    async def _wait_until_free(self, request: httpx.Request) -> None:
        try:
            async with asyncio.timeout(request.extensions["timeout"]["pool"]):
                await self._free.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout("all connections are in use", request=request) from None

    async def close(self) -> None:
        """Closes the connections that are not in use."""
        while self._idle:
            await self._idle.pop().aclose()


async def exchange(transport: httpx.AsyncBaseTransport, request: httpx.Request) -> httpx.Response:
    """Returns the response of a transport to a request, with its body."""
    response = await transport.handle_async_request(request)
    response.request = request
    await response.aread()
    return response
