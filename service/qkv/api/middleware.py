"""ASGI middleware: HEAD requests, drain, internal errors, and cross-origin requests."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.api.endpoints.oip_models import HEALTH_PATHS
from qkv.api.error_responses import error_response
from qkv.errors import ServiceUnavailable
from qkv.telemetry.worker_state import SharedState

__all__ = ["DrainMiddleware", "HeadMiddleware", "InternalErrorMiddleware", "allow_origins"]

_SERVED_WHILE_DRAINING: Final = frozenset(("/livez", "/readyz", *HEALTH_PATHS))


class HeadMiddleware:
    """Handles HEAD like GET; the server omits the body of the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        return await self._app(scope, receive, send)


class DrainMiddleware:
    """Rejects new requests while the service drains, and makes clients close their connections.

    Completes requests that the service accepted before the drain.
    """

    def __init__(self, app: ASGIApp, shared_state: SharedState) -> None:
        self._app = app
        self._shared_state = shared_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_response = False

        async def send_closing(message: Message) -> None:
            nonlocal has_response
            has_response = True
            if message["type"] == "http.response.start" and self._shared_state.is_draining:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if not self._shared_state.is_draining or scope["path"] in _SERVED_WHILE_DRAINING:
            try:
                return await self._app(scope, receive, send_closing)
            except asyncio.CancelledError:  # the drain timed out before the body was received
                if has_response:
                    raise
        stopping = ServiceUnavailable("the service is stopping", retry_after=5)
        return await error_response(stopping, scope["path"])(scope, receive, send_closing)


class InternalErrorMiddleware:
    """Ends an internal error whose response is complete. FastAPI raises the error again.

    uvicorn would then close the connection without notice: a client that sends its next request at
    once would lose it. `add_error_handlers` has logged the error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False

        async def send_noting(message: Message) -> None:
            nonlocal is_complete
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True

        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            if not is_complete:
                raise


def allow_origins(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """Returns an application that browsers may call from pages of these origins.

    It must wrap the authentication: a preflight request has no key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=(
            *("ETag", "Inference-Header-Content-Length", "Retry-After", "Server-Timing"),
            "X-Request-ID",
        ),
    )
