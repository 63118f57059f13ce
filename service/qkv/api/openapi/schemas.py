"""Parts of the JSON schemas of all operations: closed objects, tensors, fields of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pydantic

from qkv.api.job_runner import TIMEOUT_HEADER
from qkv.tensors import FLOATING

__all__ = [
    "COUNT",
    "ENCODING",
    "NON_FINITE",
    "TEXT",
    "TIMEOUT",
    "Schema",
    "closed",
    "model_fields",
    "ref",
    "tensor",
]

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
NON_FINITE: Final = ["NaN", "Infinity", "-Infinity"]
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
ENCODING: Final[Schema] = {
    "type": ["string", "null"],
    "enum": ["lists", "base64", None],
    "default": None,
    "description": "Encoding of tensors in the JSON response. By default that of the first tensor "
    "of the request.",
}


def ref(component: str) -> Schema:
    """Returns a reference to a component."""
    return {"$ref": f"#/components/schemas/{component}"}


def closed(properties: Mapping[str, Any], required: Iterable[str] | None = None) -> Schema:
    """Returns the schema of an object with these properties only; by default all are required."""
    needed = list(properties if required is None else required)
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    } | ({"required": needed} if needed else {})


def tensor(dtypes: Iterable[str], description: str) -> Schema:
    """Returns the schema of a tensor of one of these dtypes, as lists or base64."""
    known = list(dtypes)
    lists = [ref("Numbers")] if set(known) & set(FLOATING) else [ref("WholeNumbers")]
    if "bool" in known:
        lists.append(ref("Booleans"))
    base64 = ref("Base64") | {"properties": {"dtype": {"enum": known}}}
    return {"description": description, "anyOf": [*lists, base64]}


def model_fields(model: type[pydantic.BaseModel]) -> dict[str, Schema]:
    """Returns the properties of a model without titles, which only repeat the names."""
    schema = model.model_json_schema()
    properties: dict[str, Schema] = _inlined(schema.get("properties", {}), schema.get("$defs", {}))
    for field in properties.values():
        field.pop("title", None)
    return properties


def _inlined(node: Any, definitions: dict[str, Schema]) -> Any:
    """Returns a schema with definitions in place of the references to them."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if (name := node.get("$ref")) is not None:
        node = definitions[name.removeprefix("#/$defs/")] | {
            key: value for key, value in node.items() if key != "$ref"
        }
        node = {key: value for key, value in node.items() if key != "title"}
        node["properties"] = {
            key: {k: v for k, v in field.items() if k != "title"}
            for key, field in node.get("properties", {}).items()
        }
    return {key: _inlined(value, definitions) for key, value in node.items()}


TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that the request may be queued. After them it does not run. "
    "Conversions and lists of layers also end after them.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000},
}
"""The header parameter of every operation that has a deadline."""
