"""Components of the OpenAPI document that several operations share: tensors, layers, problems.

`COMPONENTS` has them by name.
"""

from __future__ import annotations

from typing import Final

from qkv.api.openapi import layer_schemas
from qkv.api.openapi.schemas import COUNT, NON_FINITE, TEXT, Schema, closed, ref
from qkv.tensors import DTYPES

__all__ = ["COMPONENTS"]

_BASE64: Final = "^[A-Za-z0-9+/]*={0,2}$"


def _catalogue_entry() -> Schema:
    """Returns the schema of a variant in the catalogue."""
    letters = {"type": "array", "items": TEXT, "description": "One letter per axis."}
    flag = {"type": "boolean"}
    dtypes = {"type": "array", "items": TEXT | {"enum": list(DTYPES)}}
    input_entry = closed({"shape": letters, "broadcasts": flag, "dtypes": dtypes, "optional": flag})
    output_entry = closed({"shape": letters, "dtype": TEXT})
    words = ("variant", "summary", "formula", "paper", "cost", "weights")
    return closed(
        dict.fromkeys(words, TEXT)
        | {
            "inputs": {"type": "object", "additionalProperties": input_entry},
            "parameters": {"type": "object", "description": "A JSON schema."},
            "refuses": {
                "type": "object",
                "additionalProperties": TEXT,
                "description": "Parameters that this variant rejects, with the reason.",
            },
            "outputs": {"type": "object", "additionalProperties": output_entry},
            "gradients": {
                "type": "array",
                "items": TEXT,
                "description": "Inputs that have gradients; empty if the variant has none.",
            },
            "picture": {
                "type": ["string", "null"],
                "description": "Path of a picture of its weights; null if there is none.",
            },
        }
    )


def _lists(of: str, description: str, *leaves: Schema) -> dict[str, Schema]:
    nested = {"type": "array", "items": ref(of)}
    return {of: {"description": description, "anyOf": [*leaves, nested]}}


_TIMES: Final = {
    "queue_ms": "In the queue.",
    "transfer_ms": "Copying tensors to the device and back.",
    "compute_ms": "Computing the variant and its layer.",
    "total_ms": "From the last byte of the request to the response.",
}

COMPONENTS: Final[dict[str, Schema]] = {
    **_lists(
        "Numbers",
        'Nested lists of numbers, not ragged. "NaN", "Infinity" and "-Infinity" are numbers.',
        {"type": "number"},
        TEXT | {"enum": NON_FINITE},
    ),
    **_lists("WholeNumbers", "Nested lists of integers, not ragged.", {"type": "integer"}),
    **_lists("Booleans", "Nested lists of booleans, not ragged.", {"type": "boolean"}),
    "Base64": {
        "description": "Little-endian, row-major bytes in base64, to match dtype and shape.",
        **closed(
            {
                "dtype": TEXT | {"enum": list(DTYPES)},
                "shape": {"type": "array", "maxItems": 8, "items": COUNT},
                "data": {"type": "string", "contentEncoding": "base64", "pattern": _BASE64},
            }
        ),
    },
    "Layer": layer_schemas.layer(),
    "LayerRead": layer_schemas.layer_read(),
    "LayerTensors": layer_schemas.weights(),
    "Timing": {
        "description": "Measured times in milliseconds; computed counts of flops and bytes.",
        **closed(
            {
                **{
                    name: {"type": "number", "minimum": 0, "description": what}
                    for name, what in _TIMES.items()
                },
                "batch_size": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Requests in the batch, including this one.",
                },
                "device": {"type": "string", "description": "The device of the run."},
                "backend": {"type": "string", "description": "The code path of the variant."},
                "flops": COUNT | {"description": "Of the matrix products."},
                "bytes": COUNT | {"description": "Of all input and output tensors."},
            }
        ),
    },
    "Problem": {
        "description": "A problem document (RFC 9457).",
        **closed(
            {
                "type": {"type": "string", "description": "The kind of problem; stable."},
                "title": TEXT,
                "status": {"type": "integer"},
                "detail": {"type": "string", "description": "The received and the expected value."},
                "pointer": {
                    "type": "string",
                    "description": "JSON pointer to the invalid part of the request.",
                },
                "limit": COUNT | {"description": "The exceeded limit, with 413."},
            },
            ("type", "title", "status", "detail"),
        ),
    },
    "Variant": _catalogue_entry(),
}
"""The referenced schemas, by name."""
