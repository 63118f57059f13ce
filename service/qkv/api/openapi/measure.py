"""What the OpenAPI document says of what is measured: comparisons and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from qkv import errors
from qkv.api import event_stream as events
from qkv.api.openapi import measure_schemas as schemas_compare
from qkv.api.openapi.examples import Pairs
from qkv.api.openapi.schemas import TIMEOUT
from qkv.engine import local
from qkv.wire import json, safetensors

__all__ = ["examples", "operations"]

_X: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
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

Problems = Callable[..., dict[str, Any]]
"""Makes the faults of an operation of statuses, and of faults that are its own."""


@cache
def examples() -> Pairs:
    """Comparisons, with what the service answers but for times."""
    inputs = {"query": _X, "key": _X, "value": _X}
    causal = {"parameters": {"causal": True}}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": (
            "Two variants beside softmax",
            {"inputs": inputs, "variants": ["linear", "mean"]},
        ),
        "parameters": (
            "With parameters, beside another anchor",
            {
                "inputs": inputs,
                "variants": [{"variant": "efficient"} | causal, "mean"],
                "anchor": {"variant": "linear"} | causal,
                "repeats": 3,
                "rows": 2,
            },
        ),
    }
    return {name: (said, body, _answered(body)) for name, (said, body) in requests.items()}


def _answered(body: dict[str, Any]) -> dict[str, Any]:
    answer = local.compare(json.decode(json.dump(body), "inputs"))
    for entry in (answer["anchor"], *answer["variants"]):
        entry["timing"] |= _TIMES
    answer["timing"] |= _TIMING
    return answer


def operations(problems: Problems) -> dict[str, dict[str, Any]]:
    """Both, by path."""
    return {"/v1/compare": _compare(problems), "/v1/sweep": _sweep(problems)}


def _compare(problems: Problems) -> dict[str, Any]:
    pairs = examples()
    file = {"type": "string", "format": "binary", "description": "The inputs by name; all else as "
            "JSON under `qkv` in the metadata."}  # fmt: skip
    asked = {n: {"summary": said, "value": body} for n, (said, body, _) in pairs.items()}
    shown = {n: {"summary": said, "value": answer} for n, (said, _, answer) in pairs.items()}
    timing = {
        "description": "The times of the timing, as W3C's Server Timing has them.",
        "required": True,
        "schema": {"type": "string"},
    }
    return {
        "parameters": [TIMEOUT],
        "requestBody": {
            "required": True,
            "description": f"Tensors, and what to run on them: {_CHOICE} each.",
            "content": {
                json.MEDIA_TYPE: {"schema": schemas_compare.comparison(), "examples": asked},
                safetensors.MEDIA_TYPE: {"schema": file},
            },
        },
        "responses": {
            "200": {
                "description": "Figures of each, and what is to be said of them.",
                "headers": {"Server-Timing": timing},
                "content": {
                    json.MEDIA_TYPE: {"schema": schemas_compare.compared(), "examples": shown}
                },
            }
        }
        | problems(400, 413, 415, 422, 500, 503, 504, faults=_faults(json.MEDIA_TYPE)),
    }


def _sweep(problems: Problems) -> dict[str, Any]:
    said = ", ".join(
        f"`{name}`, whose data is a `{component}`"
        for name, component in schemas_compare.EVENTS.items()
    )
    stream = {"schema": schemas_compare.event(), "example": _STREAM}
    unread = errors.UnsupportedMediaType(
        f"Content-Type 'text/plain' is not read here; send {json.MEDIA_TYPE}"
    )
    schema = {"schema": schemas_compare.sweep(), "example": _REQUEST}
    return {
        "parameters": [TIMEOUT],
        "requestBody": {
            "required": True,
            "description": f"What to time, {_CHOICE} each, and at which lengths.",
            "content": {json.MEDIA_TYPE: schema},
        },
        "responses": {
            "200": {
                "description": f"Server-sent events: {said}, each one line of JSON. "
                "The schema is that of one event.",
                "content": {events.MEDIA_TYPE: stream},
            }
        }
        | problems(
            400, 413, 422, 500, 503, faults=[*_faults(events.MEDIA_TYPE, json.MEDIA_TYPE), unread]
        ),
    }


def _faults(*media_types: str) -> list[errors.QkvError]:
    """Those whose words are its own."""
    return [
        errors.NotFound("no variant 'sotfmax'; /v1/variants says what there is", pointer="/anchor"),
        errors.NotAcceptable(f"Accept 'text/html' has no {' or '.join(media_types)}"),
    ]
