"""ASGI middleware: HEAD requests, timed-out drains, internal errors, and cross-origin requests."""

from __future__ import annotations

import asyncio

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.api.error_responses import error_response
from qkv.errors import ServiceUnavailable

__all__ = ["DrainTimeoutMiddleware", "HeadMiddleware", "InternalErrorMiddleware", "allow_origins"]


class HeadMiddleware:
    """Handles HEAD like GET; the server omits the body of the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        return await self._app(scope, receive, send)


class DrainTimeoutMiddleware:
    """Responds with 503 to a request that is cancelled because the drain has timed out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_response = False

        async def send_noting(message: Message) -> None:
            nonlocal has_response
            has_response = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            if has_response or scope["type"] != "http":
                raise
            stopping = ServiceUnavailable("the service is stopping", retry_after=5)
            await error_response(stopping, scope["path"])(scope, receive, send)


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
