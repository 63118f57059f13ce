"""The routes that are asked most, found by their path alone, before the framework."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.observability import request_id
from qkv.errors import Internal, NotNow, QkvError
from qkv.telemetry.worker_state import Worker

__all__ = ["ACCEPTED", "Endpoint", "Front"]

_log = logging.getLogger("qkv.app")

ACCEPTED: Final = "qkv.accepted"
"""In a scope's state: the request came before the service was told to end."""

Endpoint = Callable[[Request], Awaitable[Response]]


class Front:
    """Answers POST on the paths it knows, and hands all else on; pure ASGI.

    The framework has the same endpoints on the same paths, for its document and for other
    spellings of a path; but its way to them takes longer than a small attention.

    Args:
        app: the framework.
        endpoints: by path.
        refusal: what answers an error below a path.
        worker: counts them, and says when the service ends; then the framework refuses.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        refusal: Callable[[QkvError, str], Response],
        worker: Worker,
    ) -> None:
        self._app, self._endpoints, self._refusal, self._worker = app, endpoints, refusal, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and self._accepts(scope):
            path = scope["path"]
            if (endpoint := self._endpoints.get(path)) is not None:
                self._worker.asks(1)
                try:
                    response = await self._answered(endpoint, Request(scope, receive, send), path)
                finally:
                    self._worker.asks(-1)
                # by now it may: then its connection is not kept for another request
                if self._is_draining():
                    response.raw_headers.append((b"connection", b"close"))
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        return not self._is_draining() or ACCEPTED in scope.get("state", ())

    def _is_draining(self) -> bool:
        return self._worker.fleet.draining

    async def _answered(self, endpoint: Endpoint, request: Request, path: str) -> Response:
        try:
            return await endpoint(request)
        except QkvError as error:
            return self._refusal(error, path)
        except asyncio.CancelledError:  # the service ends, and the body has still not come
            return self._refusal(NotNow("the service is stopping", retry_after=5), path)
        except Exception as error:
            _log.error("a request to %r failed (%s)", path, request_id(), exc_info=error)
            fault = Internal("this is a fault of the service, and is logged")
            return self._refusal(fault, path)
