"""JSON schemas of the response dataclasses of `wire`, as components of the OpenAPI document."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Final

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from qkv.api.openapi.schemas import Schema, with_components
from qkv.wire.response_fields import is_left_out, json_name

__all__ = ["dataclass_schema"]

_NULL: Final = {"type": "null"}


class _Generator(GenerateJsonSchema):
    """Writes schemas as `wire.response_fields.json_fields` writes the dataclasses."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Sets no titles: they only repeat the names."""
        return False

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        """Returns a closed object with the fields' names in JSON."""
        described = super().dataclass_schema(schema)["properties"]
        attributes = fields(schema["cls"])
        return {
            "type": "object",
            "description": (inspect.getdoc(schema["cls"]) or "").partition("\n")[0],
            "properties": {
                json_name(f): _not_null(described[f.name]) if is_left_out(f) else described[f.name]
                for f in attributes
            },
            "required": [json_name(f) for f in attributes if not is_left_out(f)],
            "additionalProperties": False,
        }


def dataclass_schema(kind: type) -> Schema:
    """Returns the component of a dataclass; the dataclasses in its fields are components too."""
    found = pydantic.TypeAdapter(kind).json_schema(schema_generator=_Generator)
    definitions = found.pop("$defs", {})
    name = found.pop("$ref", f"#/$defs/{kind.__name__}")
    component: Schema = with_components({"$ref": name}, {kind.__name__: found, **definitions})
    return component


def _not_null(schema: Schema) -> Schema:
    """Returns the schema of a field that is left out instead of being null."""
    rest = {name: value for name, value in schema.items() if name not in ("default", "anyOf")}
    either: list[Schema] = [one for one in schema.get("anyOf", []) if one != _NULL]
    if len(either) == 1:
        return either[0] | rest
    return rest | ({"anyOf": either} if either else {})
