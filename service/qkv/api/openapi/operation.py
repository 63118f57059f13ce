"""Parts of operations in the OpenAPI document: errors, headers, formats, names of variants."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import PlainValidator

from qkv import errors
from qkv.attention import catalogue
from qkv.wire import CODECS, json, safetensors, tensor_types

BINARY: Final = {"type": "string", "format": "binary"}

_PROBLEM: Final = {"$ref": "#/components/schemas/Problem"}
_TEXT: Final = {"type": "string"}

SERVER_TIMING: Final = {
    "Server-Timing": {
        "description": "The times of `timing`, in the format of Server-Timing (W3C).",
        "required": True,
        "schema": _TEXT,
        "example": "queue;dur=0.0200, transfer;dur=0.0200, compute;dur=0.1100, total;dur=0.2800",
    }
}

CACHE_HEADERS: Final = {
    "ETag": {
        "description": "For `If-None-Match` in the next request.",
        "required": True,
        "schema": _TEXT,
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


def in_safetensors(description: str) -> dict[str, Any]:
    """Returns the content of a body or a response in the format safetensors."""
    return {safetensors.MEDIA_TYPE: {"schema": BINARY | {"description": description}}}


def variant_name() -> Any:
    """Returns the type of a path's parameter that is a variant's name.

    The handler finds the variant: its error is another than that of an invalid value.
    """
    names = list(catalogue.variants())
    return Annotated[
        str,
        PlainValidator(str, json_schema_input_type=tensor_types.enumeration("VariantName", *names)),
        Path(description="The variant's name.", openapi_examples={names[0]: {"value": names[0]}}),
    ]


def unknown_variant() -> errors.NotFound:
    """Returns the error for a path with a name that no variant has."""
    return errors.NotFound(f"no variant 'sotfmax'; there are {', '.join(catalogue.variants())}")


def problem_responses(
    *statuses: int, extra: Iterable[errors.QkvError] = ()
) -> dict[int | str, dict[str, Any]]:
    """Returns the error responses with these statuses, and those of these errors."""
    responses: dict[int, dict[str, Any]] = {}
    for error in [*(e for e in PROBLEMS if e.status in statuses), *extra]:
        summary = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        responses[error.status] = {
            "description": f"{error.title}. {summary}",
            "content": {json.PROBLEM_TYPE: {"schema": _PROBLEM, "example": error.problem()}},
        }
        if error.retry_after is not None:
            responses[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds until the client may retry.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return dict(sorted(responses.items()))
