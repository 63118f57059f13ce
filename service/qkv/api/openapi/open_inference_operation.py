"""The operations of the Open Inference Protocol in the OpenAPI document, and their errors."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from fastapi.routing import APIRoute

from qkv.wire import json

_ERROR: Final = {"$ref": "#/components/schemas/ModelError"}
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


def new_router(route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """Returns a router of the protocol; its operation ids are `v2_` and the function's name."""
    return APIRouter(
        tags=["open inference protocol"],
        route_class=route_class,
        generate_unique_id_function=lambda r: f"v2_{r.name}",
    )


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the error responses with these statuses."""
    by_status: dict[int | str, dict[str, Any]] = {
        s: _in_json(_ERROR_DESCRIPTIONS[s]) for s in sorted(statuses)
    }
    for status in {429, 503} & by_status.keys():
        wait = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        by_status[status]["headers"] = {"Retry-After": wait}
    return by_status


def unauthorized() -> dict[str, Any]:
    """Returns the response to a request without a valid API key."""
    return _in_json("The request has none of the API keys.")


def _in_json(description: str) -> dict[str, Any]:
    return {"description": description, "content": {json.MEDIA_TYPE: {"schema": _ERROR}}}
