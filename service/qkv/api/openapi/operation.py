"""One operation of the OpenAPI document: its bodies, parameters, responses and errors.

`describe` returns what an endpoint gives to its route as `openapi_extra`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from qkv import errors
from qkv.api.job_runner import TIMEOUT_HEADER
from qkv.api.openapi.schemas import PROBLEM, TEXT, Schema, enumeration
from qkv.attention import catalogue
from qkv.wire import CODECS, json, safetensors

__all__ = [
    "BINARY",
    "CACHE_HEADERS",
    "NOT_MODIFIED",
    "PROBLEMS",
    "SERVER_TIMING",
    "TIMEOUT",
    "describe",
    "in_both_formats",
    "in_json",
    "problem_responses",
    "unknown_variant",
    "variant_parameter",
]

BINARY: Final[Schema] = {"type": "string", "format": "binary"}

TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that the request may be queued. After them it does not run. "
    "Conversions and lists of layers also end after them.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000},
}
"""The header parameter of every operation that has a deadline."""

SERVER_TIMING: Final = {
    "Server-Timing": {
        "description": "The times of `timing`, in the format of Server-Timing (W3C).",
        "required": True,
        "schema": TEXT,
        "example": "queue;dur=0.0200, transfer;dur=0.0200, compute;dur=0.1100, total;dur=0.2800",
    }
}

CACHE_HEADERS: Final = {
    "ETag": {
        "description": "For `If-None-Match` in the next request.",
        "required": True,
        "schema": TEXT,
    }
}
NOT_MODIFIED: Final = {"description": "The cached response is current.", "headers": CACHE_HEADERS}
"""The response 304 to a request for a file that the client has."""

PROBLEMS: Final[tuple[errors.QkvError, ...]] = (
    errors.MalformedRequest("the body must be a JSON object"),
    errors.NotAcceptable(
        f"Accept excludes every format: got 'text/html', expected {' or '.join(CODECS)}"
    ),
    errors.PayloadTooLarge(
        "the body is too large: got 300000000 bytes, expected at most 268435456", limit=268435456
    ),
    errors.UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {' or '.join(CODECS)}"
    ),
    errors.InvalidContent(
        'encoding is unknown: got "raw", expected lists or base64', pointer="/encoding"
    ),
    errors.TooManyRequests(
        "the key alice has its share of the queue, which others use too: 512 requests are queued "
        "or being received, the limit is 512",
        retry_after=2,
    ),
    errors.Internal("internal error; it was logged with the id in X-Request-ID"),
    errors.stopping(),
    errors.DeadlineExceeded("the request waited 2500 ms in the queue, its deadline passed"),
)
"""An error of each kind, with a detail of the service."""


def describe(
    responses: Mapping[str, Any],
    body: Mapping[str, Any] | None = None,
    parameters: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the description of an operation.

    Args:
        responses: by status, those of errors included.
        body: of the request, as `in_json` returns it; None: there is none.
        parameters: in the path and in headers.
    """
    described: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        described["requestBody"] = {"required": True, **body}
    return described | {"responses": dict(responses)}


def in_json(description: str, schema: Schema) -> dict[str, Any]:
    """Returns a body or a response of JSON."""
    return {"description": description, "content": {json.MEDIA_TYPE: {"schema": schema}}}


def in_both_formats(description: str, schema: Schema, file: str) -> dict[str, Any]:
    """Returns a body or a response of JSON or safetensors; `file` describes the latter."""
    body = in_json(description, schema)
    body["content"][safetensors.MEDIA_TYPE] = {"schema": BINARY | {"description": file}}
    return body


def variant_parameter(name: str) -> dict[str, Any]:
    """Returns the parameter of a path with a variant's name."""
    names = list(catalogue.variants())
    return {
        "name": name, "in": "path", "required": True, "description": "The variant's name.",
        "schema": enumeration("VariantName", names), "example": names[0],
    }  # fmt: skip


def unknown_variant() -> errors.NotFound:
    """Returns the error for a path with a name that no variant has."""
    return errors.NotFound(f"no variant 'sotfmax'; there are {', '.join(catalogue.variants())}")


def problem_responses(*statuses: int, extra: Iterable[errors.QkvError] = ()) -> dict[str, Any]:
    """Returns the error responses with these statuses, and those of these errors."""
    responses = {}
    for error in [*(e for e in PROBLEMS if e.status in statuses), *extra]:
        summary = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        responses[error.status] = {
            "description": f"{error.title}. {summary}",
            "content": {json.PROBLEM_TYPE: {"schema": PROBLEM, "example": error.problem()}},
        }
        if error.retry_after is not None:
            responses[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds until the client may retry.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): responses[status] for status in sorted(responses)}
