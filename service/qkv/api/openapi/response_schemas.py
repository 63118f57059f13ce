"""JSON schemas of the responses of `wire`, as components of the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from qkv.api.openapi.schemas import Schema, with_components
from qkv.wire.response import Response

__all__ = ["response_schema"]

_NULL: Final = {"type": "null"}


def response_schema(kind: type[Response]) -> Schema:
    """Returns the component of a response; the objects in its fields are components too."""
    (reference,), definitions = msgspec.json.schema_components(
        [kind], ref_template="#/$defs/{name}"
    )
    closed = {name: _closed(definition) for name, definition in definitions.items()}
    component: Schema = with_components(reference, closed)
    return component


def _closed(definition: dict[str, Any]) -> Schema:
    """Returns the schema of an object without other fields, described in one line."""
    properties = {
        name: _not_null(schema) if "default" in schema else schema
        for name, schema in definition["properties"].items()
    }
    description = definition["description"].partition("\n")[0]
    return definition | {
        "description": description,
        "properties": properties,
        "additionalProperties": False,
    }


def _not_null(schema: Schema) -> Schema:
    """Returns the schema of a field that is left out instead of being null."""
    rest = {name: value for name, value in schema.items() if name not in ("default", "anyOf")}
    either: list[Schema] = [one for one in schema.get("anyOf", []) if one != _NULL]
    if len(either) == 1:
        return either[0] | rest
    return rest | ({"anyOf": either} if either else {})
