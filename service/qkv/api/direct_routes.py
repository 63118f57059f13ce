"""Direct routes: calls the endpoints that run variants by path, without FastAPI's routing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.observability import request_id
from qkv.errors import Internal, QkvError, ServiceUnavailable
from qkv.telemetry.worker_state import WorkerState

__all__ = ["DirectRouter", "Endpoint"]

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRouter:
    """Calls the endpoint of a POST by its path; passes all other requests to the application.

    FastAPI has the same endpoints, for its document and for other spellings of a path. Its routing
    takes longer than a small attention.

    Args:
        app: handles all other requests.
        endpoints: by path.
        error_response: returns the response for an error at a path.
        worker: counts requests in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        error_response: Callable[[QkvError, str], Response],
        worker: WorkerState,
    ) -> None:
        self._app, self._endpoints, self._error_response, self._worker = (
            app,
            endpoints,
            error_response,
            worker,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            if (endpoint := self._endpoints.get(path)) is not None:
                self._worker.add_in_flight(1)
                try:
                    response = await self._call(endpoint, Request(scope, receive, send), path)
                finally:
                    self._worker.add_in_flight(-1)
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    async def _call(self, endpoint: Endpoint, request: Request, path: str) -> Response:
        try:
            return await endpoint(request)
        except QkvError as error:
            return self._error_response(error, path)
        except asyncio.CancelledError:  # the drain has timed out
            return self._error_response(
                ServiceUnavailable("the service is stopping", retry_after=5), path
            )
        except Exception as error:
            _log.error("a request to %r failed (%s)", path, request_id(), exc_info=error)
            fault = Internal("internal error; it was logged with the id in X-Request-ID")
            return self._error_response(fault, path)
