"""Error responses of operations in the OpenAPI document: a problem document for each status."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from qkv import errors
from qkv.api.openapi import examples, schemas
from qkv.wire import json

__all__ = ["problem_responses"]


def problem_responses(*statuses: int, extra: Iterable[errors.QkvError] = ()) -> dict[str, Any]:
    """Returns the error responses with these statuses, and those of these errors."""
    responses = {}
    for error in [*(e for e in examples.PROBLEMS if e.status in statuses), *extra]:
        problem = error.problem()
        fixed = {name: {"const": problem[name]} for name in ("type", "title", "status")}
        schema = schemas.ref("Problem") | {"properties": fixed}
        if isinstance(error, errors.InvalidContent):
            schema["required"] = ["pointer"]
        summary = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        responses[error.status] = {
            "description": f"{error.title}. {summary}",
            "content": {json.PROBLEM_TYPE: {"schema": schema, "example": problem}},
        }
        if isinstance(error, errors.ServiceUnavailable):
            responses[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds until the client may retry.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): responses[status] for status in sorted(responses)}
