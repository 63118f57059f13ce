"""Operations of the Open Inference Protocol in the OpenAPI document: their responses and errors."""

from __future__ import annotations

from typing import Any, Final

from qkv.api.openapi.operation import describe, in_json, variant_parameter
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import Schema
from qkv.wire import open_inference_responses

__all__ = [
    "describe_health",
    "describe_model",
    "describe_server",
    "error_responses",
    "unauthorized",
]

_ERROR_DESCRIPTIONS: Final = {
    400: "The request is invalid.",
    403: "The request is for another host, or from a page of another origin.",
    404: "The model or the version does not exist, or the model is unloaded.",
    408: "The request did not arrive in time.",
    413: "The request exceeds a limit.",
    429: "The API key has its share of the queue, which others use too.",
    431: "The headers are too large.",
    500: "Internal error; it was logged.",
    501: "The transfer coding is not supported.",
    503: "The service is unavailable, or the deadline was exceeded.",
}


def describe_server(
    response: Schema, *statuses: int, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the description of an operation on the server.

    Args:
        response: schema of the response 200.
        *statuses: of its errors, other than 500 and 503.
        body: of the request, which may be empty; None: there is none.
    """
    responses = {"200": in_json("OK.", response)} | error_responses(500, 503, *statuses)
    return describe(responses, None if body is None else body | {"required": False})


def describe_health(kind: type) -> dict[str, Any]:
    """Returns the description of a probe of the server."""
    schema = response_schema(kind)
    good, bad = in_json("OK.", schema), in_json("The check fails.", schema)
    return describe({"200": good, "503": bad} | error_responses(500))


def describe_model(
    response: Schema, *statuses: int, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the description of an operation on one model; arguments as for the server."""
    described = describe_server(response, 404, *statuses, body=body)
    return {"parameters": [variant_parameter("model")]} | described


def error_responses(*statuses: int) -> dict[str, Any]:
    """Returns the error responses with these statuses."""
    schema = response_schema(open_inference_responses.ModelError)
    by_status = {str(s): in_json(_ERROR_DESCRIPTIONS[s], schema) for s in sorted(statuses)}
    for status in {"429", "503"} & by_status.keys():
        wait = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        by_status[status]["headers"] = {"Retry-After": wait}
    return by_status


def unauthorized() -> dict[str, Any]:
    """Returns the response to a request without a valid API key."""
    schema = response_schema(open_inference_responses.ModelError)
    return in_json("The request has none of the API keys.", schema)
