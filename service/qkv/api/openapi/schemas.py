"""Parts of the JSON schemas of several operations: components, tensors, fields of pydantic models.

A component is a schema with a name. Generators of clients make a class of each, so that unions and
objects have names of their own. `document` moves components to their place in the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pydantic

from qkv.tensors import DTYPES, FLOATING

__all__ = [
    "COMPONENT",
    "COUNT",
    "ENCODING",
    "FLAG",
    "FLAT_OR_NESTED",
    "FLOATING_DTYPE",
    "NON_FINITE",
    "NOTES",
    "NUMBER",
    "PROBLEM",
    "TENSOR",
    "TEXT",
    "TIMING",
    "Schema",
    "closed",
    "either",
    "enumeration",
    "list_of",
    "model_fields",
    "named",
    "nullable",
    "pascal",
    "say_default",
    "tensor_of",
    "with_components",
]

Schema = dict[str, Any]

COMPONENT: Final = "$component"
"""The key of a component in a schema: its name and its content."""

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NON_FINITE: Final = ["NaN", "Infinity", "-Infinity"]

_AXES: Final = 4  # (B, H, L, D): recursive schemas have no types in most languages
_BASE64: Final = "^[A-Za-z0-9+/]*={0,2}$"


def named(name: str, schema: Schema) -> Schema:
    """Returns a reference to a component."""
    return {COMPONENT: (name, schema)}


def pascal(name: str) -> str:
    """Returns the name of a variant as the beginning of a component's name."""
    return "".join(part.capitalize() for part in name.split("_"))


def closed(properties: Mapping[str, Any], required: Iterable[str] | None = None) -> Schema:
    """Returns the schema of an object with these properties only; by default all are required."""
    needed = list(properties if required is None else required)
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    } | ({"required": needed} if needed else {})


def either(*schemas: Schema) -> Schema:
    """Returns the union of schemas; the schema itself if it is the only one."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Returns the union of a schema and null."""
    return {"anyOf": [schema, {"type": "null"}]}


def enumeration(name: str, values: Iterable[str]) -> Schema:
    """Returns the component of texts with these values only."""
    return named(name, TEXT | {"enum": list(values)})


def list_of(items: Schema, **keywords: Any) -> Schema:
    """Returns the schema of an array."""
    return {"type": "array", "items": items, **keywords}


FLOATING_DTYPE: Final = enumeration("FloatingDtype", FLOATING)
NUMBER: Final = named(
    "Number", {"anyOf": [{"type": "number"}, enumeration("NonFiniteNumber", NON_FINITE)]}
)
ENCODING: Final[Schema] = nullable(enumeration("Encoding", ["lists", "base64"])) | {
    "description": "Encoding of tensors in the JSON response. By default that of the first tensor "
    "of the request.",
}


def _nested(leaf: Schema, axes: int = _AXES) -> list[Schema]:
    """Returns the schemas of a number, and of nested arrays of each rank."""
    ranks = [leaf]
    for _ in range(axes):
        ranks.append(list_of(ranks[-1]))
    return ranks


_BYTES: Final = named(
    "Base64Tensor",
    closed(
        {
            "dtype": enumeration("Dtype", DTYPES),
            "shape": list_of(COUNT, maxItems=8),
            "data": {"type": "string", "contentEncoding": "base64", "pattern": _BASE64},
        }
    )
    | {"description": "Little-endian, row-major bytes in base64, to match dtype and shape."},
)
TENSOR: Final = named(
    "Tensor",
    {
        "anyOf": [*_nested(NUMBER), _BYTES],
        "description": "A number, nested lists of numbers that are not ragged, or base64.",
    },
)
_WIDE_TENSOR: Final = named(
    "TensorOfFiveAxes",
    {
        "anyOf": [*_nested(NUMBER, 5), _BYTES],
        "description": "The same with one axis more, (B, H, L, S, E).",
    },
)
_INTEGERS: Final = named("IntegerTensor", {"anyOf": [*_nested({"type": "integer"}), _BYTES]})
_MASK: Final = named("MaskTensor", {"anyOf": [*_nested(FLAG), *_nested(NUMBER), _BYTES]})


FLAT_OR_NESTED: Final = named(
    "InferData",
    {
        "anyOf": [*_nested(NUMBER)[1:], *_nested(FLAG)[1:]],
        "description": "Flat, or nested as in the shape.",
    },
)


def tensor_of(dtypes: Iterable[str], description: str, axes: int = _AXES) -> Schema:
    """Returns the schema of a tensor of one of these dtypes; only floating ones have five axes."""
    known = set(dtypes)
    if axes > _AXES:
        return _WIDE_TENSOR | {"description": description}
    kind = _MASK if "bool" in known else TENSOR if known & set(FLOATING) else _INTEGERS
    return kind | {"description": description}


_TIMES: Final = {
    "queue_ms": "In the queue.",
    "transfer_ms": "Copying tensors to the device and back.",
    "compute_ms": "Computing the variant and its layer.",
    "total_ms": "From the last byte of the request to the response.",
}
TIMING: Final = named(
    "Timing",
    closed(
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
            "device": TEXT | {"description": "The device of the run."},
            "backend": TEXT | {"description": "The code path of the variant."},
            "flops": COUNT | {"description": "Of the matrix products."},
            "bytes": COUNT | {"description": "Of all input and output tensors."},
        }
    )
    | {"description": "Measured times in milliseconds; computed counts of flops and bytes."},
)
NOTES: Final = (
    "Parameters of a loaded layer that the variant lacks and does not apply, and facts that make "
    "the numbers less exact"
)
PROBLEM: Final = named(
    "Problem",
    closed(
        {
            "type": TEXT | {"description": "The kind of problem; stable."},
            "title": TEXT,
            "status": {"type": "integer"},
            "detail": TEXT | {"description": "The received and the expected value."},
            "pointer": TEXT | {"description": "JSON pointer to the invalid part of the request."},
            "limit": COUNT | {"description": "The exceeded limit, with 413."},
        },
        ("type", "title", "status", "detail"),
    )
    | {"description": "A problem document (RFC 9457)."},
)


def model_fields(model: type[pydantic.BaseModel]) -> dict[str, Schema]:
    """Returns the properties of a model without titles, which only repeat the names."""
    schema = model.model_json_schema()
    properties: dict[str, Schema] = with_components(
        schema.get("properties", {}), schema.get("$defs", {})
    )
    return properties


def say_default(schema: Schema) -> Schema:
    """Returns a schema whose default is in its description.

    Some generators require a field that has the keyword `default`, in requests too.
    """
    is_field = any(isinstance(schema.get(key), str) for key in ("description", "title"))
    if "default" not in schema or not is_field:  # a property may have the name "default"
        return schema
    rest = {name: value for name, value in schema.items() if name != "default"}
    if schema["default"] is None:  # the same as to leave the field out
        return rest
    default = f"Default: `{json.dumps(schema['default'])}`."
    return rest | {"description": f"{schema.get('description', '')} {default}".strip()}


def with_components(node: Any, definitions: Mapping[str, Schema]) -> Any:
    """Returns a part of pydantic's schema with components in place of its references."""
    if isinstance(node, list):
        return [with_components(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = say_default(node)
    rest = {
        key: with_components(value, definitions)
        for key, value in node.items()
        if key != "$ref" and not (key == "title" and isinstance(value, str))
    }
    if node.get("enum") == list(FLOATING):
        return FLOATING_DTYPE | {n: x for n, x in rest.items() if n not in ("enum", "type")}
    if (reference := node.get("$ref")) is None:
        return rest
    name = reference.removeprefix("#/$defs/")
    return named(name, with_components(definitions[name], definitions)) | rest
