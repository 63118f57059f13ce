"""Errors as HTTP responses: problem documents (RFC 9457), or the protocol's form below /v2.

`ErrorMiddleware` answers what is raised within it; FastAPI's own errors become errors of qkv in
`handle_http_error` and `handle_validation_error`.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.request_record import record, record_error
from qkv.errors import (
    Internal,
    InvalidContent,
    MethodNotAllowed,
    NotFound,
    QkvError,
    format_value,
    pointer_to,
    stopping,
)
from qkv.wire import json
from qkv.wire.open_inference_responses import ModelError

_log = logging.getLogger(__name__)

_OPEN_INFERENCE_STATUSES = {406: 400, 415: 400, 422: 400, 504: 503}
"""Triton's statuses: 400 for any invalid request, and 503 also for an exceeded deadline."""


def error_response(error: QkvError, path: str) -> Response:
    """Returns the response for an error at a path, and records the error."""
    record_error(error)
    problem, headers = error.problem(), error.headers()
    if path == "/v2" or path.startswith("/v2/"):
        status = _OPEN_INFERENCE_STATUSES.get(error.status, error.status)
        body = ModelError(error=problem["detail"]).to_json()  # `problem` truncates it
        return Response(body, status, headers, media_type=json.MEDIA_TYPE)
    return Response(json.dump(problem), error.status, headers, media_type=json.PROBLEM_TYPE)


class ErrorMiddleware:
    """A middleware that answers requests whose handling raises, and serves HEAD as GET.

    It is inside the middleware of CORS, so that pages of other origins can read an error. FastAPI's
    outermost middleware would answer a bug too, but raise it again, so that it is logged twice.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            if scope["method"] == "HEAD":  # the server leaves out the body of the response
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            if record().status:  # the response has begun
                raise
            response = error_response(_as_problem(error, scope), scope["path"])
            await response(scope, receive, send)


def _as_problem(error: BaseException, scope: Scope) -> QkvError:
    """Returns the error that a client gets; logs a bug."""
    if isinstance(error, QkvError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the drain has timed out
        return stopping()
    _log.error("a request to %r failed (%s)", scope["path"], record().id_text, exc_info=error)
    return Internal("internal error; it was logged with the id in X-Request-ID")


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Returns the response for an unknown path, or for a method that a path does not have."""
    assert isinstance(error, HTTPException)
    problem = unknown_path(request.scope)
    if error.status_code == 405:
        problem = _unknown_method(request)
    return error_response(problem, request.scope["path"])


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """Returns the response for a parameter in the path or in a header that is invalid."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    _, *place = fault["loc"]
    problem = InvalidContent(
        f"{'.'.join(map(str, place))} is invalid: got {format_value(fault['input'])}, "
        f"{fault['msg']}",
        pointer=pointer_to(*place),
    )
    return error_response(problem, request.scope["path"])


def unknown_path(scope: Scope) -> QkvError:
    """Returns the error of a path that no route has."""
    return NotFound(f"path {scope['path'][:200]} does not exist; /docs lists all paths")


def _unknown_method(request: Request) -> QkvError:
    scope, allowed = request.scope, set()
    for context in iter_route_contexts(request.app.routes):  # the error has those of one route
        if context.original_route.matches(scope)[0] != Match.NONE:
            allowed |= context.methods or {"GET"}  # a folder of files has no methods
    allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
    return MethodNotAllowed(
        f"method is not allowed: got {scope['method']}, expected {allow}", allow=allow
    )
