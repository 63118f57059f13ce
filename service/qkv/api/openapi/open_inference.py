"""The part of the OpenAPI document about `/v2`, the Open Inference Protocol."""

from __future__ import annotations

from typing import Any, Final

from qkv.api.openapi import examples
from qkv.api.openapi.response_schemas import response_components
from qkv.api.openapi.schemas import TIMEOUT, closed, ref
from qkv.attention import catalogue
from qkv.wire import json, oip_responses
from qkv.wire.open_inference import LENGTH_HEADER

__all__ = ["components", "error_responses", "operations", "unauthorized"]

Schema = dict[str, Any]

_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_BINARY: Final = "application/octet-stream"
_NUMBERS: Final = {"anyOf": [ref("Numbers"), ref("Booleans")]}
_RESPONSES: Final[dict[str, type]] = {
    "/v2": oip_responses.ServerMetadata,
    "/v2/health/live": oip_responses.ServerLive,
    "/v2/health/ready": oip_responses.ServerReady,
    "/v2/models": oip_responses.ModelList,
    "/v2/models/stats": oip_responses.StatisticsResponse,
    "/v2/models/{model}": oip_responses.ModelMetadata,
    "/v2/models/{model}/ready": oip_responses.ModelReady,
    "/v2/models/{model}/config": oip_responses.ModelConfig,
    "/v2/models/{model}/stats": oip_responses.StatisticsResponse,
    "/v2/models/{model}/infer": oip_responses.InferResponse,
    "/v2/repository/index": oip_responses.RepositoryModel,
    "/v2/repository/models/{model}/load": oip_responses.Loaded,
    "/v2/repository/models/{model}/unload": oip_responses.Unloaded,
}
"""The response of each operation, or an item of its list."""
_ERROR_DESCRIPTIONS: Final = {
    400: "The request is invalid.",
    403: "The request is for another host, or from a page of another origin.",
    404: "The model or the version does not exist, or the model is unloaded.",
    408: "The request did not arrive in time.",
    413: "The request exceeds a limit.",
    431: "The headers are too large.",
    500: "Internal error; it was logged.",
    501: "The transfer coding is not supported.",
    503: "The service is unavailable, or the deadline was exceeded.",
}


def components() -> dict[str, Schema]:
    """Returns the schemas of responses and of the inference request, by name."""
    kinds = dict.fromkeys(_RESPONSES.values())
    found = response_components(*kinds, oip_responses.ModelNotReady, oip_responses.ModelError)
    tensor = found["InferTensor"]
    tensor["properties"]["data"] |= _NUMBERS
    tensor["oneOf"] = [{"required": ["data"]}, {"required": ["parameters"]}]
    found["InferResponse"]["properties"]["parameters"] = ref("Timing")
    return found | {"InferRequest": _infer_request()}


def _infer_request() -> Schema:
    binary = _nullable(closed({"binary_data": _FLAG}, ()))
    output = closed({"name": _TEXT, "parameters": binary}, ["name"])
    echoed = "If present, the same as in the path."
    return closed(
        {
            "id": _nullable(_TEXT) | {"description": "The response repeats it."},
            "model_name": _nullable(_TEXT) | {"description": echoed},
            "model_version": _nullable(_TEXT) | {"description": echoed},
            "parameters": _nullable({"type": "object"})
            | {
                "description": "Parameters of the variant; lists and objects may be JSON in a "
                "string. Also `binary_data_output` (default of `binary_data` of each output), "
                "`priority` (1 first, 3 last, default 2) and `timeout` (microseconds in the queue)."
            },
            "inputs": {"type": "array", "maxItems": 256, "items": ref("InferTensor")},
            "outputs": _nullable({"type": "array", "items": output})
            | {"description": "The outputs to return; default: `output`."},
        },
        ["inputs"],
    )


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def operations() -> dict[str, dict[str, Any]]:
    """Returns every operation below `/v2`, by path."""
    by_path = {
        path: (_of_model if "{model}" in path else _json_operation)(
            ref(kind.__name__), *((500,) if path.startswith("/v2/health") else (500, 503))
        )
        for path, kind in _RESPONSES.items()
    }
    for path in ("/v2/health/live", "/v2/health/ready"):
        schema = ref(_RESPONSES[path].__name__)
        by_path[path]["responses"]["503"] = _json_response("The check fails.", schema)
    by_path["/v2/models/{model}/ready"]["responses"]["400"] = _json_response(
        "The model is unloaded, or the request is invalid.",
        {"anyOf": [ref("ModelNotReady"), ref("ModelError")]},
    )
    by_path["/v2/models/{model}/infer"] = _infer()
    entries = {"type": "array", "items": ref("RepositoryModel")}
    by_path["/v2/repository/index"] = _json_body(closed({"ready": _FLAG}, ())) | _json_operation(
        entries, 400, 500, 503
    )
    for verb, flags in (("load", {}), ("unload", {"unload_dependents": _FLAG})):
        path = f"/v2/repository/models/{{model}}/{verb}"
        by_path[path] = _json_body(
            closed({"parameters": _nullable(closed(flags, ()))}, ())
        ) | _of_model(ref(_RESPONSES[path].__name__), 400, 500, 503)
    return by_path


def _infer() -> dict[str, Any]:
    header = {
        "name": LENGTH_HEADER,
        "in": "header",
        "required": False,
        "description": "Bytes of the JSON, if tensors follow it.",
        "schema": {"type": "integer", "minimum": 0},
    }
    request, response = examples.inference()
    binary = _TEXT | {"format": "binary", "description": "The JSON, then the tensors."}
    body = {
        json.MEDIA_TYPE: {"schema": ref("InferRequest"), "example": request},
        _BINARY: {"schema": binary},
    }
    timing = {"description": "The times of the parameters.", "required": True, "schema": _TEXT}
    ok_response = {
        "description": "The requested outputs, and the timing.",
        "content": {
            json.MEDIA_TYPE: {"schema": ref("InferResponse"), "example": response},
            _BINARY: {"schema": binary},
        },
        "headers": {"Server-Timing": timing},
    }
    operation = _of_model({}, 400, 413, 500, 503)
    operation["responses"]["200"] = ok_response
    operation["parameters"] += [header, TIMEOUT]
    return operation | {"requestBody": {"required": True, "content": body}}


def _of_model(schema: Schema, *statuses: int) -> dict[str, Any]:
    """Returns an operation on one model."""
    names = list(catalogue.variants())
    model = {
        "name": "model", "in": "path", "required": True, "description": "A variant's name.",
        "schema": {"type": "string", "enum": names}, "example": names[0],
    }  # fmt: skip
    return {"parameters": [model]} | _json_operation(schema, *statuses, 404)


def _json_body(schema: Schema) -> dict[str, Any]:
    return {"requestBody": {"required": False, "content": {json.MEDIA_TYPE: {"schema": schema}}}}


def _json_operation(schema: Schema, *statuses: int) -> dict[str, Any]:
    """Returns an operation with a JSON response; `statuses` are those of its errors."""
    return {"responses": {"200": _json_response("OK.", schema)} | error_responses(*statuses)}


def error_responses(*statuses: int) -> dict[str, Any]:
    """Returns the error responses with these statuses."""
    by_status = {
        str(status): _json_response(_ERROR_DESCRIPTIONS[status], ref("ModelError"))
        for status in sorted(statuses)
    }
    if "503" in by_status:
        wait = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        by_status["503"]["headers"] = {"Retry-After": wait}
    return by_status


def unauthorized() -> dict[str, Any]:
    """Returns the response to a request without a valid API key."""
    return _json_response("The request has none of the API keys.", ref("ModelError"))


def _json_response(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {json.MEDIA_TYPE: {"schema": schema}}}
