"""JSON schemas of layers: in a request, their tensors in each layout, and conversions.

They are derived from the layouts and the fields of jobs.
"""

from __future__ import annotations

from typing import Final

from qkv.api.openapi.schemas import COUNT, ENCODING, TEXT, Schema, closed, model_fields, ref, tensor
from qkv.attention.layers.layouts import LAYOUTS, Layout
from qkv.attention.layers.projections import ROLES, SPELLINGS
from qkv.jobs.convert import ConvertFields
from qkv.jobs.fields import LayerFields
from qkv.tensors import FLOATING

__all__ = ["convert_request", "convert_response", "layer", "weights"]

_LAYOUT: Final[Schema] = TEXT | {"enum": list(LAYOUTS)}


def convert_request() -> Schema:
    """Returns the schema of the JSON body of a conversion."""
    fields = model_fields(ConvertFields)
    fields["from"] |= _LAYOUT
    fields["to"] |= _LAYOUT
    every = {"from": fields.pop("from"), "to": fields.pop("to"), "tensors": {"type": "object"}}
    body = closed(every | fields | {"encoding": ENCODING}, list(every))
    return body | {"oneOf": _per_layout("from")}


def convert_response() -> Schema:
    """Returns the schema of the JSON response of a conversion."""
    size = {"anyOf": [{"type": "number", "minimum": 0}, TEXT | {"enum": ["NaN", "Infinity"]}]}
    check = {
        "largest_absolute_difference": size,
        "largest_absolute_output": size,
        "elements": COUNT,
        "dtype": {"const": "float64"},
    }
    body = closed(
        {"from": _LAYOUT, "to": _LAYOUT, "tensors": {"type": "object"}, "check": closed(check)}
    )
    return body | {"oneOf": _per_layout("to")}


def layer() -> Schema:
    """Returns the schema of a layer in a request."""
    heads = model_fields(LayerFields)["heads"]
    return {
        "description": "A layer that projects the inputs.",
        "oneOf": [
            closed(
                {"layout": {"const": n}, "heads": heads, "tensors": ref(f"Weights{n.upper()}")},
                ["layout", "tensors"],
            )
            for n in LAYOUTS
        ],
    }


def weights(layout: Layout) -> Schema:
    """Returns the schema of a layer's tensors: each role once, in one of its spellings."""
    first, *others = layout.SUFFIXES
    spelled = [s + suffix for role in ROLES for s in SPELLINGS[role] for suffix in layout.SUFFIXES]
    body = closed({name: tensor(FLOATING, "") for name in spelled}, ())
    once = [{"oneOf": [{"required": [s + first]} for s in SPELLINGS[role]]} for role in ROLES]
    beside = {s + o: [s + first] for role in ROLES for s in SPELLINGS[role] for o in others}
    return body | {"allOf": once} | ({"dependentRequired": beside} if beside else {})


def _per_layout(field: str) -> list[Schema]:
    """Returns the schemas of tensors for each layout in a field."""
    return [
        {"properties": {field: {"const": name}, "tensors": ref(f"Weights{name.upper()}")}}
        for name in LAYOUTS
    ]
