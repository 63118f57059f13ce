"""Finds the endpoint of a request, and responds to its errors: all requests end here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from qkv.api.error_responses import error_response
from qkv.api.observability import has_responded, request_id
from qkv.errors import Internal, MethodNotAllowed, NotFound, QkvError, stopping
from qkv.telemetry.worker_state import WorkerState

__all__ = ["Dispatcher", "Endpoint"]

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Dispatcher:
    """A dispatcher that calls the endpoint of a run by its path, and FastAPI's for the others.

    Args:
        app: has all endpoints. Its routing takes longer than a small attention.
        endpoints: those of POST that run variants, by path.
        worker: counts the requests that run a job.
    """

    def __init__(
        self, app: FastAPI, endpoints: Mapping[str, Endpoint], worker: WorkerState
    ) -> None:
        self._app, self._endpoints, self._worker = app, endpoints, worker
        self._router = AsyncExitStackMiddleware(app.router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        endpoint = None
        if scope["method"] == "POST" and b"%" not in scope.get("raw_path", b""):
            endpoint = self._endpoints.get(scope["path"])
        try:
            if endpoint is None:
                await self._route(scope, receive, send)
                return
            response = await self._run(endpoint, Request(scope, receive, send))
        except (Exception, asyncio.CancelledError) as error:
            if has_responded():
                raise
            response = error_response(_as_problem(error, scope), scope["path"])
        await response(scope, receive, send)

    async def _run(self, endpoint: Endpoint, request: Request) -> Response:
        self._worker.add_in_flight(1)
        try:
            return await endpoint(request)
        finally:
            self._worker.add_in_flight(-1)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if b"%2f" in scope.get("raw_path", b"").lower():
            # it is not the slash that the decoded path has, and a gateway's rules tell them apart
            raise HTTPException(404)
        scope["app"] = self._app
        if scope["method"] == "HEAD":  # the server leaves out the body of the response
            scope = {**scope, "method": "GET"}
        await self._router(scope, receive, send)


def _as_problem(error: BaseException, scope: Scope) -> QkvError:
    """Returns the error that a client gets; logs a bug."""
    if isinstance(error, QkvError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the drain has timed out
        return stopping()
    if isinstance(error, HTTPException):
        return _routing_error(error, scope)
    _log.error("a request to %r failed (%s)", scope["path"], request_id(), exc_info=error)
    return Internal("internal error; it was logged with the id in X-Request-ID")


def _routing_error(error: HTTPException, scope: Scope) -> QkvError:
    """Returns the error of an unknown path, or of a method that a path does not have."""
    if error.status_code != 405:
        return NotFound(f"path {scope['path'][:200]} does not exist; /docs lists all paths")
    allowed = set((error.headers or {}).get("Allow", "").split(", "))
    for route in getattr(scope["app"].state, "routes", ()):  # the error has those of the first one
        if route.matches(scope)[0] != Match.NONE:
            allowed |= route.methods
    allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
    return MethodNotAllowed(
        f"method is not allowed: got {scope['method']}, expected {allow}", allow=allow
    )
