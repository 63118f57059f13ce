"""What the OpenAPI document says of /v2, the Open Inference Protocol."""

from __future__ import annotations

from typing import Any, Final

from qkv.api.endpoints.oip_models import VERSION
from qkv.api.openapi import examples
from qkv.api.openapi.schemas import TIMEOUT, closed, ref
from qkv.attention import catalogue
from qkv.wire import json
from qkv.wire.open_inference import DATATYPES, LENGTH_HEADER

__all__ = ["COMPONENTS", "error_responses", "operations", "unauthorized"]

_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_BINARY: Final = "application/octet-stream"
_DATATYPE: Final = {"type": "string", "enum": list(DATATYPES.values())}
_DATA: Final = {
    "description": "Flat, or nested as the shape says.",
    "anyOf": [ref("Numbers"), ref("Booleans")],
}
_SHAPE: Final = {"type": "array", "maxItems": 8, "items": _COUNT}
_SIZE: Final = closed({"binary_data_size": _COUNT})
_SIZES: Final = {
    "type": "array",
    "items": {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]},
    "description": "-1: any size.",
}
_AXES: Final = {"type": "array", "items": _TEXT, "description": "One letter per axis."}
_STAGE: Final = closed({"count": _COUNT, "ns": _COUNT})
_STAGES: Final = ("compute_input", "compute_infer", "compute_output")

_ERROR_DESCRIPTIONS: Final = {
    400: "Something is wrong with the request.",
    404: "No such model or version, or it is unloaded.",
    408: "It did not come in time.",
    413: "It can never fit the limits.",
    431: "What stands before the body is too long.",
    500: "A fault of the service, which is logged.",
    503: "Not now, or its time was up.",
}


def _tensor(parameters: Any, data: Any) -> dict[str, Any]:
    """A tensor, with its numbers or with the size of its bytes."""
    fields = {"name": _TEXT, "datatype": _DATATYPE, "shape": _SHAPE}
    body = closed(fields | {"parameters": parameters, "data": data}, list(fields))
    return body | {"oneOf": [{"required": ["data"]}, {"required": ["parameters"]}]}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_REQUESTED_OUTPUT: Final = closed(
    {"name": _TEXT, "parameters": _nullable(closed({"binary_data": _FLAG}, ()))}, ["name"]
)

COMPONENTS: Final[dict[str, Any]] = {
    "V2Tensor": {
        "description": "A tensor: its numbers in data, or the size of its bytes, which follow the "
        "JSON in the order of the list.",
        **_tensor(_SIZE, _DATA),
    },
    "V2Request": closed(
        {
            "id": _nullable(_TEXT) | {"description": "Comes back with the answer."},
            "model_name": _nullable(_TEXT) | {"description": "As in the path, if at all."},
            "model_version": _nullable(_TEXT) | {"description": "As in the path, if at all."},
            "parameters": _nullable({"type": "object"})
            | {
                "description": "The variant's, lists and objects maybe as strings that are JSON; "
                "binary_data_output (whether outputs go as bytes where they do not say), priority "
                "(1 first, 3 last, else 2) and timeout (microseconds that it may wait)."
            },
            "inputs": {"type": "array", "maxItems": 256, "items": ref("V2Tensor")},
            "outputs": _nullable(
                {
                    "type": "array",
                    "items": closed(
                        {
                            "name": _TEXT,
                            "parameters": _nullable(closed({"binary_data": _FLAG}, ())),
                        },
                        ["name"],
                    ),
                }
            )
            | {"description": "What to return; output, if nothing is said."},
        },
        ["inputs"],
    ),
    "V2Answer": closed(
        {
            "model_name": _TEXT,
            "model_version": {"const": VERSION},
            "id": _TEXT,
            "parameters": ref("Timing"),
            "outputs": {"type": "array", "items": ref("V2Tensor")},
        },
        ["model_name", "model_version", "parameters", "outputs"],
    ),
    "V2Error": closed({"error": _TEXT}),
    "V2Statistics": closed(
        {
            "name": _TEXT,
            "version": {"const": VERSION},
            "last_inference": _COUNT | {"description": "Milliseconds since 1970; 0: none yet."},
            "inference_count": _COUNT,
            "execution_count": _COUNT,
            "inference_stats": closed(
                dict.fromkeys(("success", "fail", "queue", *_STAGES), _STAGE)
            ),
            "batch_stats": {
                "type": "array",
                "items": closed(
                    {"batch_size": {"type": "integer", "minimum": 1}}
                    | dict.fromkeys(_STAGES, _STAGE)
                ),
            },
        }
    ),
}
"""What the schemas refer to, by name."""


def operations() -> dict[str, dict[str, Any]]:
    """Every operation below /v2, by path."""
    listed = {"type": "array", "items": _TEXT}
    stats = closed({"model_stats": {"type": "array", "items": ref("V2Statistics")}})
    flags = closed({"live": _FLAG})
    both = closed({"live": _FLAG, "ready": _FLAG})
    server = closed({"name": {"const": "qkv"}, "version": _TEXT, "extensions": listed})
    entry = closed(dict.fromkeys(("name", "version", "state", "reason"), _TEXT))
    by_path = {
        "/v2": _json_operation(server, 500, 503),
        "/v2/health/live": _json_operation(flags, 500),
        "/v2/health/ready": _json_operation(both, 500),
        "/v2/models": _json_operation(closed({"models": listed}), 500, 503),
        "/v2/models/stats": _json_operation(stats, 500, 503),
        "/v2/models/{model}": _of_model(_metadata()),
        "/v2/models/{model}/ready": _of_model(closed({"name": _TEXT, "ready": {"const": True}})),
        "/v2/models/{model}/config": _of_model(
            {"type": "object", "description": "ModelConfig of Triton's model_config.proto."}
        ),
        "/v2/models/{model}/stats": _of_model(stats),
        "/v2/models/{model}/infer": _infer(),
        "/v2/repository/index": _json_body(closed({"ready": _FLAG}, ()))
        | _json_operation({"type": "array", "items": entry}, 400, 500, 503),
    }
    for path, schema in (("/v2/health/live", flags), ("/v2/health/ready", both)):
        by_path[path]["responses"]["503"] = _json_response("No.", schema)
    unloaded = closed({"error": _TEXT, "name": _TEXT, "ready": {"const": False}})
    by_path["/v2/models/{model}/ready"]["responses"]["400"] = _json_response(
        "The model is unloaded, or something is wrong with the request.",
        {"anyOf": [unloaded, ref("V2Error")]},
    )
    for verb in ("load", "unload"):
        parameters = closed({"unload_dependents": _FLAG} if verb == "unload" else {}, ())
        by_path[f"/v2/repository/models/{{model}}/{verb}"] = _json_body(
            closed({"parameters": _nullable(parameters)}, ())
        ) | _of_model(closed({"name": _TEXT, verb: {"const": True}}), 400)
    return by_path


def _infer() -> dict[str, Any]:
    size = {
        "description": "Bytes of the JSON, where tensors follow it.",
        "schema": _COUNT,
    }
    header = {"name": LENGTH_HEADER, "in": "header", "required": False} | size
    request, response = examples.inference()
    binary_body = {
        "type": "string",
        "format": "binary",
        "description": "The JSON, then the tensors.",
    }
    body = {
        json.MEDIA_TYPE: {"schema": ref("V2Request"), "example": request},
        _BINARY: {"schema": binary_body},
    }
    response_content = {
        json.MEDIA_TYPE: {"schema": ref("V2Answer"), "example": response},
        _BINARY: {"schema": binary_body},
    }
    timing = {"description": "The times of the parameters.", "required": True, "schema": _TEXT}
    ok_response = {
        "description": "The outputs asked for, and the timing.",
        "content": response_content,
        "headers": {"Server-Timing": timing},
    }
    operation = _of_model({}, 400, 413)
    operation["responses"] = {"200": ok_response} | {
        status: error_response
        for status, error_response in operation["responses"].items()
        if status != "200"
    }
    operation["parameters"] += [header, TIMEOUT]
    return operation | {"requestBody": {"required": True, "content": body}}


def _metadata() -> dict[str, Any]:
    tensor = {"name": _TEXT, "datatype": _DATATYPE, "shape": _SIZES}
    datatypes = {"type": "array", "items": _DATATYPE}
    input_parameters = closed({"datatypes": datatypes, "axes": _AXES, "optional": _FLAG})
    output_parameters = closed({"axes": _AXES, "on_request": _FLAG})
    return closed(
        {
            "name": _TEXT,
            "versions": {"const": [VERSION]},
            "platform": {"const": "qkv"},
            "inputs": {"type": "array", "items": closed(tensor | {"parameters": input_parameters})},
            "outputs": {
                "type": "array",
                "items": closed(tensor | {"parameters": output_parameters}),
            },
        }
    )


def _of_model(schema: dict[str, Any], *statuses: int) -> dict[str, Any]:
    """An operation on one model."""
    names = list(catalogue.variants())
    model = {
        "name": "model", "in": "path", "required": True, "description": "A variant's name.",
        "schema": {"type": "string", "enum": names}, "example": names[0],
    }  # fmt: skip
    return {"parameters": [model]} | _json_operation(schema, *statuses, 404, 500, 503)


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": False, "content": {json.MEDIA_TYPE: {"schema": schema}}}}


def _json_operation(schema: dict[str, Any], *statuses: int) -> dict[str, Any]:
    """An operation that answers in JSON; its faults are those with these statuses."""
    return {
        "responses": {"200": _json_response("What was asked for.", schema)}
        | error_responses(*statuses)
    }


def error_responses(*statuses: int) -> dict[str, Any]:
    """The error responses with these statuses."""
    by_status = {
        str(status): _json_response(_ERROR_DESCRIPTIONS[status], ref("V2Error"))
        for status in sorted(statuses)
    }
    if "503" in by_status:
        wait = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        by_status["503"]["headers"] = {"Retry-After": wait}
    return by_status


def unauthorized() -> dict[str, Any]:
    """What says that a request had no key."""
    return _json_response("It came without one of the service's keys.", ref("V2Error"))


def _json_response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {json.MEDIA_TYPE: {"schema": schema}}}
