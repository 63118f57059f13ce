"""The operation of inference in the OpenAPI document. `open_inference_infer` registers it."""

from __future__ import annotations

from typing import Any, Final

from qkv.api.endpoints.open_inference_catalogue import VERSION
from qkv.api.openapi.open_inference_operation import describe_model
from qkv.api.openapi.operation import BINARY, SERVER_TIMING, TIMEOUT, in_json
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import (
    COMPONENT,
    COUNT,
    FLAG,
    FLAT_OR_NESTED,
    NOTES,
    TEXT,
    TIMING,
    Schema,
    closed,
    enumeration,
    list_of,
    named,
    nullable,
)
from qkv.wire import open_inference
from qkv.wire.open_inference_responses import BinarySize

__all__ = ["BINARY_TYPE", "describe_infer"]

BINARY_TYPE: Final = "application/octet-stream"
"""The media type of JSON with tensors after it."""


def describe_infer() -> dict[str, Any]:
    """Returns the description of the operation."""
    binary = BINARY | {"description": "The JSON, then the tensors."}
    body = in_json("Tensors, parameters, and the requested outputs.", _request_schema())
    response = closed(
        {
            "model_name": TEXT,
            "model_version": {"const": VERSION},
            "id": TEXT | {"description": "The id of the request, if it has one."},
            "parameters": _response_parameters(),
            "outputs": list_of(_tensor_schema()),
        },
        ["model_name", "model_version", "parameters", "outputs"],
    )
    described = describe_model(named("InferResponse", response), 400, 413, 429, body=body)
    described["requestBody"]["required"] = True
    good = described["responses"]["200"]
    good |= {"description": "The requested outputs, and the timing.", "headers": SERVER_TIMING}
    for part in (body, good):
        part["content"][BINARY_TYPE] = {"schema": binary}
    header = {
        "name": open_inference.LENGTH_HEADER,
        "in": "header",
        "required": False,
        "description": "Bytes of the JSON, if tensors follow it.",
        "schema": COUNT,
    }
    described["parameters"] += [header, TIMEOUT]
    return described


def _response_parameters() -> Schema:
    """Returns the component of the timing, with notes."""
    _, timing = TIMING[COMPONENT]
    notes = TEXT | {"description": f"{NOTES}, separated by semicolons."}
    return named(
        "InferParameters",
        timing | {"properties": timing["properties"] | {"notes": notes}},
    )


def _request_schema() -> Schema:
    binary = named("BinaryOutput", closed({"binary_data": FLAG}, ()))
    output = closed({"name": TEXT, "parameters": nullable(binary)}, ["name"])
    echoed = {"description": "If present, the same as in the path."}
    parameters = {
        "description": "Parameters of the variant; lists and objects may be JSON in a string. "
        "`variant` of a model that is a layer (default `softmax`). Also "
        "`binary_data_output` (default of `binary_data` of each output), `priority` (1 first, 3 "
        "last, default 2) and `timeout` (microseconds in the queue)."
    }
    fields = {
        "id": nullable(TEXT) | {"description": "The response repeats it."},
        "model_name": nullable(TEXT) | echoed,
        "model_version": nullable(TEXT) | echoed,
        "parameters": nullable({"type": "object"}) | parameters,
        "inputs": list_of(_tensor_schema(), maxItems=256),
        "outputs": nullable(list_of(named("RequestedOutput", output)))
        | {"description": "The outputs to return; default: `output`."},
    }
    return named("InferRequest", closed(fields, ["inputs"]))


def _tensor_schema() -> Schema:
    """Returns the component of a tensor: with its numbers, or the number of its bytes."""
    datatypes = enumeration("Datatype", open_inference.DATATYPES.values())
    fields = {
        "name": TEXT,
        "datatype": datatypes,
        "shape": list_of(COUNT, maxItems=8),
        "parameters": response_schema(BinarySize),
        "data": FLAT_OR_NESTED,
    }
    return named("InferTensor", closed(fields, ["name", "datatype", "shape"]))
