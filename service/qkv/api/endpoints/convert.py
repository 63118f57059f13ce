"""POST /v1/convert: converts a layer's weights to another layout, or detects their layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run_schemas import ANY_LAYOUT, LAYER_TENSORS, LAYOUT
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import TIMEOUT, describe, in_both_formats, problem_responses
from qkv.api.openapi.schemas import (
    COUNT,
    ENCODING,
    NUMBER,
    TEXT,
    Schema,
    closed,
    either,
    enumeration,
    list_of,
    model_fields,
    named,
    nullable,
    tensor_of,
)
from qkv.api.request_body import TensorResponse, read_message
from qkv.api.work_threads import WorkThreads
from qkv.attention.layers.detection import MAX_DETECTED
from qkv.attention.layers.layer_options import LayerOptions
from qkv.jobs.convert import ConvertFields, convert_message, working_bytes
from qkv.settings import Settings
from qkv.tensors import FLOATING

__all__ = ["router"]

_THREADS: Final = 2
_ROTARY_ORDER: Final = enumeration("RotaryOrder", ["half", "interleaved"])


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["layers"])
    threads = WorkThreads("convert", _THREADS)

    @routes.post(
        "/v1/convert",
        operation_id="convert",
        summary="Converts a layer's weights to another layout, and verifies the result.",
        description="No number changes. Layout v1 has `W_query`, `W_key` and `W_value` of shape "
        "(in, out), applied as `x @ W`. Layout v2 is that of `nn.Linear`: `W_query.weight` of "
        "shape (out, in) and optionally `W_query.bias`. With `check`, the service finds layout, "
        "heads, rotary order and scale by running: it compares candidates with the output of the "
        "real module.",
        openapi_extra=_describe(),
    )
    async def convert_weights(request: Request) -> Response:
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(
                request, "tensors", settings.max_body_bytes, admission.grow
            )
            admission.is_received = True
            admission.grow(working_bytes(received.message))
            codec = received.response_codec

            def work(raise_if_stopped: Callable[[], None]) -> list[bytes | memoryview]:
                converted = convert_message(received.message, raise_if_stopped)
                raise_if_stopped()
                return codec.encode(converted, "tensors")

            chunks = await threads.run(request, received.received_at, wait_s, work)
        return TensorResponse(chunks, codec.MEDIA_TYPE)

    return routes


def _describe() -> dict[str, Any]:
    """Returns the description of the operation."""
    body = in_both_formats(
        "The tensors of a layer, and the target layout, or a check to detect their layout.",
        _request(),
        "The tensors by name, those of a check as `check.x` and `check.y`; all other fields as "
        "JSON under `qkv` in the metadata.",
    )
    good = in_both_formats(
        "The tensors in the target layout, and the difference of both layers' outputs on the same "
        "random input. With a check, the candidates that fit it best.",
        _response(),
        "The tensors by name; all other fields as JSON under `qkv` in the metadata.",
    )
    errors = problem_responses(400, 406, 413, 415, 422, 429, 500, 503, 504)
    return describe({"200": good} | errors, body, [TIMEOUT])


def _request() -> Schema:
    """Returns the schema of a body: a conversion, or a detection with `check`."""
    fields = model_fields(ConvertFields)
    x, y = tensor_of(FLOATING, "Hidden states"), tensor_of(FLOATING, "The module's output")
    check = named("LayerCheck", closed({"x": x, "y": y}))
    source, target = fields["from"]["description"], fields["to"]["description"]
    shared = fields | {
        "from": ANY_LAYOUT | {"description": source},
        "tensors": LAYER_TENSORS,
        "to_order": nullable(_ROTARY_ORDER) | {"description": fields["to_order"]["description"]},
        "encoding": ENCODING,
    }
    conversion = {n: x for n, x in shared.items() if n not in ("check", "scale")} | {
        "to": LAYOUT | {"description": target}
    }
    detection = shared | {
        "to": nullable(LAYOUT) | {"description": target},
        "check": check | {"description": fields["check"]["description"]},
    }
    return either(
        named("ConvertRequest", closed(conversion, ["from", "to", "tensors"])),
        named("DetectRequest", closed(detection, ["from", "tensors", "check"])),
    )


def _response() -> Schema:
    """Returns the schema of a response: a conversion, or a detection without a target."""
    compared = {
        "largest_absolute_difference": NUMBER,
        "largest_absolute_output": NUMBER,
        "elements": COUNT,
        "dtype": {"const": "float64"},
    }
    about = "Names of tensors that belong to no part of the attention."
    layer = {
        "from": LAYOUT,
        "prefix": TEXT | {"description": "Of the names of the layer's tensors."},
        "ignored": list_of(TEXT, description=about),
    }
    detected = list_of(
        _detected(),
        minItems=1,
        maxItems=MAX_DETECTED,
        description="If the request has `check`: candidates, best first.",
    )
    order = {"description": "Of the response; null if it is unknown."}
    options = model_fields(LayerOptions) | {"layout": LAYOUT}
    about = "Of a request with the tensors, without fields at their defaults."
    converted = layer | {
        "to": LAYOUT,
        "rotary_order": nullable(_ROTARY_ORDER) | order,
        "layer": named("ConvertedLayer", closed(options, ["layout"])) | {"description": about},
        "tensors": LAYER_TENSORS,
        "check": named("ConversionCheck", closed(compared)),
    }
    return either(
        named("ConvertResponse", closed(converted | {"detected": detected}, converted)),
        named("DetectResponse", closed(layer | {"detected": detected})),
    )


def _detected() -> Schema:
    """Returns the schema of a candidate of a detection."""
    layer = model_fields(LayerOptions)
    error = "Largest absolute difference to `y`, divided by its largest size."
    order = {"description": "The order of rotary channels; null: not rotary."}
    return named(
        "DetectedLayer",
        closed(
            {
                "layout": LAYOUT,
                "heads": COUNT,
                "kv_heads": COUNT,
                "rotary": nullable(_ROTARY_ORDER) | order,
                "scale": {"type": "number", "exclusiveMinimum": 0},
                "causal": {"type": "boolean"},
                "rope": layer["rope"],
                "alibi": layer["alibi"],
                "qk_norm": nullable(layer["qk_norm"]),
                "error": {"type": "number", "minimum": 0, "description": error},
            }
        ),
    )
