"""Errors as HTTP responses: problem documents (RFC 9457), or the protocol's form below /v2.

The dispatcher, middleware and connections call `error_response`.
"""

from __future__ import annotations

from fastapi import Response

from qkv.api.endpoints.open_inference_models import open_inference_error_response
from qkv.api.observability import record_error
from qkv.errors import QkvError
from qkv.wire import json

__all__ = ["error_response"]


def error_response(error: QkvError, path: str) -> Response:
    """Returns the response for an error at a path, and records the error."""
    record_error(error)
    if path == "/v2" or path.startswith("/v2/"):
        return open_inference_error_response(error)
    return Response(
        json.dump(error.problem()),
        status_code=error.status,
        media_type=json.PROBLEM_TYPE,
        headers=error.headers(),
    )
