"""Errors as HTTP responses: problem documents (RFC 9457), or the protocol's form below /v2.

Middleware and connections call `error_response`; `add_error_handlers` is for FastAPI.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from qkv.api.endpoints.oip_models import oip_error_response
from qkv.api.observability import record_error, request_id
from qkv.errors import Internal, MethodNotAllowed, NotFound, QkvError
from qkv.wire import json

__all__ = ["add_error_handlers", "error_response"]

_log = logging.getLogger(__name__)


def error_response(error: QkvError, path: str) -> Response:
    """Returns the response for an error at a path, and records the error."""
    record_error(error)
    if path == "/v2" or path.startswith("/v2/"):
        return oip_error_response(error)
    return Response(
        json.dump(error.problem()),
        status_code=error.status,
        media_type=json.PROBLEM_TYPE,
        headers=error.headers(),
    )


def add_error_handlers(app: FastAPI) -> None:
    """Makes an application respond to every error with `error_response`."""
    app.add_exception_handler(QkvError, _on_qkv_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)


async def _on_qkv_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QkvError)
    return error_response(error, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Responds to an unknown path, and to a method that a path does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = set((error.headers or {}).get("Allow", "").split(", "))
        allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
        reason: QkvError = MethodNotAllowed(
            f"method is not allowed: got {request.method}, expected {allow}", allow=allow
        )
    else:
        reason = NotFound(f"path {request.url.path[:200]} does not exist; /docs lists all paths")
    return await _on_qkv_error(request, reason)


async def _on_exception(request: Request, error: Exception) -> Response:
    _log.error("a request to %r failed (%s)", request.url.path, request_id(), exc_info=error)
    internal = Internal("internal error; it was logged with the id in X-Request-ID")
    return await _on_qkv_error(request, internal)
