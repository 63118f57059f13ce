"""The part of the OpenAPI document about compare and sweep."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from qkv import errors
from qkv.api import event_stream
from qkv.api.openapi import measure_schemas
from qkv.api.openapi.examples import Examples
from qkv.api.openapi.problem_responses import problem_responses
from qkv.api.openapi.schemas import TIMEOUT, ref
from qkv.engine import local
from qkv.wire import json, safetensors

__all__ = ["examples", "operations"]

_X: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
_HEADS: Final = [_X, [[0.11, 0.64, 0.32], [0.82, 0.05, 0.47], [0.29, 0.91, 0.18]]]
_TIMES: Final = {"median_ms": 0.11, "least_ms": 0.1, "most_ms": 0.14}
_TIMING: Final = {"queue_ms": 0.2, "transfer_ms": 0.2, "compute_ms": 1.1, "total_ms": 2.8}
_CHOICE: Final = "a variant's name, or an object of `variant` and `parameters`"
_REQUEST: Final = {"variants": ["softmax", "linear"], "lengths": [256, 1024], "repeats": 3}
_STREAM: Final = """\
event: progress
data: {"done":0,"total":4,"variant":"softmax","length":256}

event: cell
data: {"index":0,"parameters":{},"variant":"softmax","length":256,"median_ms":1.9,"least_ms":1.8,\
"most_ms":2.4,"repeats":3,"flops":134217728,"bytes":2097152,"peak_bytes":614912}

"""


@cache
def examples() -> Examples:
    """Returns examples of comparisons, with fixed times."""
    inputs = {"query": _X, "key": _X, "value": _X}
    causal = {"parameters": {"causal": True}}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": (
            "Two variants, compared with softmax",
            {"inputs": inputs, "variants": ["linear", "mean"]},
        ),
        "parameters": (
            "Variants with parameters, and another baseline",
            {
                "inputs": inputs,
                "variants": [{"variant": "efficient"} | causal, "mean"],
                "anchor": {"variant": "linear"} | causal,
                "repeats": 3,
                "rows": 2,
            },
        ),
        "heads": (
            "Figures of each of two heads",
            {
                "inputs": {"query": [_HEADS], "key": [_HEADS], "value": [_HEADS]},
                "variants": ["linear"],
                "per_head": True,
            },
        ),
    }
    return {name: (summary, body, _with_times(body)) for name, (summary, body) in requests.items()}


def _with_times(body: dict[str, Any]) -> dict[str, Any]:
    report = local.compare(json.decode(json.dump(body), "inputs"))
    for entry in (report["anchor"], *report["variants"]):
        entry["timing"] |= _TIMES
    report["timing"] |= _TIMING
    return report


def operations() -> dict[str, dict[str, Any]]:
    """Returns both operations, by path."""
    return {"/v1/compare": _compare(), "/v1/sweep": _sweep()}


def _compare() -> dict[str, Any]:
    cases = examples()
    file = {"type": "string", "format": "binary", "description": "The inputs by name; all other "
            "fields as JSON under `qkv` in the metadata."}  # fmt: skip
    request_examples = {
        n: {"summary": summary, "value": body} for n, (summary, body, _) in cases.items()
    }
    response_examples = {
        n: {"summary": summary, "value": report} for n, (summary, _, report) in cases.items()
    }
    timing = {
        "description": "The times of `timing`, in the format of Server-Timing (W3C).",
        "required": True,
        "schema": {"type": "string"},
    }
    return {
        "parameters": [TIMEOUT],
        "requestBody": {
            "required": True,
            "description": f"Tensors, and variants to compare on them: {_CHOICE} each.",
            "content": {
                json.MEDIA_TYPE: {
                    "schema": measure_schemas.compare_request(),
                    "examples": request_examples,
                },
                safetensors.MEDIA_TYPE: {"schema": file},
            },
        },
        "responses": {
            "200": {
                "description": "Measurements of each variant, and notes.",
                "headers": {"Server-Timing": timing},
                "content": {
                    json.MEDIA_TYPE: {
                        "schema": ref("CompareResponse"),
                        "examples": response_examples,
                    }
                },
            }
        }
        | problem_responses(
            400, 413, 415, 422, 500, 503, 504, extra=_specific_errors(json.MEDIA_TYPE)
        ),
    }


def _sweep() -> dict[str, Any]:
    summary = ", ".join(
        f"`{name}`, whose data is a `{kind.__name__}`"
        for name, kind in measure_schemas.EVENTS.items()
    )
    stream = {"schema": measure_schemas.event(), "example": _STREAM}
    not_json = errors.UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    )
    schema = {"schema": measure_schemas.sweep_request(), "example": _REQUEST}
    return {
        "parameters": [TIMEOUT],
        "requestBody": {
            "required": True,
            "description": f"The variants to time, {_CHOICE} each, and the lengths.",
            "content": {json.MEDIA_TYPE: schema},
        },
        "responses": {
            "200": {
                "description": f"Server-sent events: {summary}, each one line of JSON. "
                "The schema describes one event.",
                "content": {event_stream.MEDIA_TYPE: stream},
            }
        }
        | problem_responses(
            400,
            413,
            422,
            500,
            503,
            extra=[*_specific_errors(event_stream.MEDIA_TYPE, json.MEDIA_TYPE), not_json],
        ),
    }


def _specific_errors(*media_types: str) -> list[errors.QkvError]:
    """Returns the errors with details of their own."""
    return [
        errors.NotFound("no variant 'sotfmax'; /v1/variants lists all", pointer="/anchor"),
        errors.NotAcceptable(
            f"Accept excludes every format: got 'text/html', expected {' or '.join(media_types)}"
        ),
    ]
