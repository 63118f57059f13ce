"""OpenAPI schemas, made of what the variants and the wire formats say of themselves."""

from __future__ import annotations

from typing import Any, Final

from qkv import errors
from qkv.catalogue import Input, Variant
from qkv.job import Run
from qkv.layers.layouts import LAYOUTS
from qkv.tensors import DTYPES
from qkv.wire import json, safetensors

__all__ = [
    "COMPONENTS",
    "attention_request",
    "attention_responses",
    "complete",
    "convert_request",
    "problems",
]

COMPONENTS: Final[dict[str, Any]] = {
    "TensorLists": {
        "description": 'Nested lists of numbers or booleans; "NaN", "Infinity" and "-Infinity" '
        "stand for what JSON lacks.",
        "anyOf": [
            {"type": "number"},
            {"type": "boolean"},
            {"enum": ["NaN", "Infinity", "-Infinity"]},
            {"type": "array", "items": {"$ref": "#/components/schemas/TensorLists"}},
        ],
    },
    "TensorBase64": {
        "description": "Little-endian, row-major bytes in base64.",
        "type": "object",
        "required": ["dtype", "shape", "data"],
        "additionalProperties": False,
        "properties": {
            "dtype": {"enum": list(DTYPES)},
            "shape": {
                "type": "array",
                "maxItems": 8,
                "items": {"type": "integer", "minimum": 0},
            },
            "data": {"type": "string", "contentEncoding": "base64"},
        },
    },
    "Tensor": {
        "oneOf": [
            {"$ref": "#/components/schemas/TensorLists"},
            {"$ref": "#/components/schemas/TensorBase64"},
        ]
    },
    "Tensors": {
        "type": "object",
        "additionalProperties": {"$ref": "#/components/schemas/Tensor"},
    },
    "Problem": {
        "description": "RFC 9457 problem document.",
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "pointer": {"type": "string", "description": "JSON pointer to what is at fault."},
        },
    },
    "Timing": {
        "description": "Measured, in milliseconds; flops and bytes are analytic.",
        "type": "object",
        "required": [
            "queue_ms", "transfer_ms", "compute_ms", "total_ms",
            "batch_size", "device", "backend", "flops", "bytes",
        ],
        "properties": {
            **{f"{s}_ms": {"type": "number"} for s in ("queue", "transfer", "compute", "total")},
            "batch_size": {"type": "integer"},
            "device": {"type": "string"},
            "backend": {"type": "string"},
            "flops": {"type": "integer"},
            "bytes": {"type": "integer"},
        },
    },
}  # fmt: skip

_TENSOR: Final = {"$ref": "#/components/schemas/Tensor"}
_TENSORS: Final = {"$ref": "#/components/schemas/Tensors"}
_ENCODING: Final = {
    "enum": ["lists", "base64", None],
    "description": "How the answer's tensors are written; as the first one came, if absent.",
}
_HEADS: Final = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": 65536}, {"type": "null"}],
}
_EXAMPLE: Final = {
    "query": [[1, 0], [0, 1]],
    "key": [[1, 0], [0, 1]],
    "value": [[1, 2], [3, 4]],
}


def complete(document: dict[str, Any]) -> None:
    """Adds the components that routes refer to, and takes out the validation errors that FastAPI
    expects of every path with a parameter: none of ours has them."""
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if "HTTPValidationError" in str(content):
                del operation["responses"]["422"]
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.pop("HTTPValidationError", None)
    components.pop("ValidationError", None)
    components.update(COMPONENTS)


def attention_request(variant: Variant) -> dict[str, Any]:
    """The body of a run of this variant."""
    inputs = {name: _input(spec) for name, spec in variant.inputs.items()}
    inputs["x"] = inputs.get("x", _TENSOR | {"description": "(L, M) or (B, L, M), with a layer"})
    run = Run.model_json_schema(ref_template="#/components/schemas/{model}")
    fields = run["properties"]
    fields["parameters"] = _inlined(variant.parameters.model_json_schema())
    fields["outputs"] = {
        "anyOf": [
            {"type": "array", "minItems": 1, "items": {"enum": list(variant.outputs)}},
            {"type": "null"},
        ]
    }
    fields["layer"] = {
        "description": "A layer that projects the inputs.",
        "anyOf": [{"type": "string"}, {"type": "null"}, _layer()],
    }
    schema = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {"type": "object", "additionalProperties": False, "properties": inputs},
            **fields,
            "encoding": _ENCODING,
        },
    }
    content: dict[str, Any] = {"schema": schema}
    if {n for n, i in variant.inputs.items() if not i.optional} == _EXAMPLE.keys():
        content["example"] = {"inputs": _EXAMPLE}
    return {"requestBody": {"required": True, "content": _in_every_format(content)}}


def attention_responses(variant: Variant) -> dict[int | str, dict[str, Any]]:
    """The answers of a run of this variant, faults too."""
    outputs = {
        name: _TENSOR | {"description": f"({', '.join(o.letters)})"}
        for name, o in variant.outputs.items()
    }
    schema = {
        "type": "object",
        "required": ["variant", "outputs", "timing"],
        "properties": {
            "variant": {"const": variant.name},
            "outputs": {"type": "object", "additionalProperties": False, "properties": outputs},
            "timing": {"$ref": "#/components/schemas/Timing"},
        },
    }
    good = {
        "description": "The outputs asked for.",
        "content": _in_every_format({"schema": schema}),
        "headers": {"Server-Timing": {"schema": {"type": "string"}}},
    }
    return {200: good} | problems(400, 404, 406, 413, 415, 422, 503)


def convert_request() -> dict[str, Any]:
    """The body of a conversion."""
    schema = {
        "type": "object",
        "required": ["from", "to", "tensors"],
        "additionalProperties": False,
        "properties": {
            "from": {"enum": list(LAYOUTS)},
            "to": {"enum": list(LAYOUTS)},
            "tensors": _TENSORS,
            "heads": _HEADS,
            "bias": {"enum": ["refuse", "augment"]},
            "dtype": {"enum": ["float64", "float32", "float16", "bfloat16"]},
            "encoding": _ENCODING,
        },
    }
    example = {
        "from": "v2",
        "to": "v1",
        "tensors": {f"W_{r}.weight": [[1, 2, 3], [4, 5, 6]] for r in ("query", "key", "value")},
    }
    content = {"schema": schema, "example": example}
    return {"requestBody": {"required": True, "content": _in_every_format(content)}}


def convert_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of a conversion, faults too."""
    schema = {
        "type": "object",
        "required": ["from", "to", "tensors", "check"],
        "properties": {
            "from": {"type": "string"},
            "to": {"type": "string"},
            "tensors": _TENSORS,
            "check": {
                "type": "object",
                "properties": {
                    "largest_absolute_difference": {"type": ["number", "string"]},
                    "largest_absolute_output": {"type": ["number", "string"]},
                    "elements": {"type": "integer"},
                    "dtype": {"type": "string"},
                },
            },
        },
    }
    good = {
        "description": "The tensors in the target layout.",
        "content": _in_every_format({"schema": schema}),
    }
    return {200: good} | problems(400, 406, 413, 415, 422, 503)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The faults with these statuses."""
    kinds = {kind.status: kind for kind in errors.QkvError.__subclasses__()}
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": kinds[status].title, "content": {json.PROBLEM_TYPE: problem}}
        for status in statuses
    }


def _in_every_format(content: dict[str, Any]) -> dict[str, Any]:
    """A body in JSON, and the same in safetensors."""
    file = {
        "type": "string",
        "format": "binary",
        "description": "A safetensors file: tensors by name, a layer's as layer.<name>, all else "
        "as JSON under qkv in the metadata.",
    }
    return {json.MEDIA_TYPE: content, safetensors.MEDIA_TYPE: {"schema": file}}


def _input(spec: Input) -> dict[str, Any]:
    broadcast = ", broadcastable" if spec.broadcasts else ""
    return _TENSOR | {
        "description": f"({', '.join(spec.letters)}){broadcast}; {' or '.join(spec.dtypes)}"
    }


def _layer() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["layout", "tensors"],
        "additionalProperties": False,
        "properties": {
            "layout": {"enum": list(LAYOUTS)},
            "heads": _HEADS,
            "tensors": _TENSORS,
        },
    }


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    assert "$defs" not in schema, "parameters are plain values"
    return schema
