"""JSON schemas of the bodies of runs, gradients, conversions and the catalogue.

They are derived from the variants, the fields of jobs, and the wire formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pydantic

from qkv.api.job_runner import TIMEOUT_HEADER
from qkv.attention.layers.layouts import LAYOUTS, Layout
from qkv.attention.layers.projections import ROLES, SPELLINGS
from qkv.attention.signature import Output
from qkv.attention.variant import Variant
from qkv.attention.variant_file import WEIGHT_KINDS
from qkv.jobs import weight_forms
from qkv.jobs.convert import ConvertFields
from qkv.jobs.fields import JobFields, LayerFields
from qkv.jobs.gradient_job import GRAD_OUTPUT
from qkv.jobs.job import RunFields
from qkv.tensors import DTYPES, FLOATING

__all__ = [
    "COMPONENTS",
    "TIMEOUT",
    "closed",
    "convert_request",
    "convert_response",
    "gradients_request",
    "gradients_response",
    "ref",
    "request",
    "response",
]

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_KINDS: Final[Schema] = _TEXT | {"enum": list(WEIGHT_KINDS)}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_LAYOUT: Final[Schema] = _TEXT | {"enum": list(LAYOUTS)}
_NON_FINITE: Final = ["NaN", "Infinity", "-Infinity"]
_BASE64: Final = "^[A-Za-z0-9+/]*={0,2}$"
_ENCODING: Final[Schema] = {
    "type": ["string", "null"],
    "enum": ["lists", "base64", None],
    "default": None,
    "description": "Encoding of tensors in the JSON response; null: that of the request's first.",
}


def ref(component: str) -> Schema:
    """Returns a reference to a component."""
    return {"$ref": f"#/components/schemas/{component}"}


def request(variant: Variant) -> Schema:
    """Returns the schema of the JSON body of a run."""
    body = _body(variant, _fields(RunFields), {})
    body["properties"]["outputs"] |= {
        "anyOf": [
            {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": _TEXT | {"enum": list(variant.outputs)},
            },
            {"type": "null"},
        ]
    }
    if (weights := variant.outputs.get("weights")) is None:
        body["properties"]["weights"] = {"enum": ["full", "none"], "default": "full"}
        return body
    body["properties"]["weights"] = weight_forms.schema(weights)
    with_weights: Schema = {"contains": {"const": "weights"}}
    body["allOf"] += [
        _if_weights({"const": "none"}, {"anyOf": [{"type": "null"}, {"not": with_weights}]}),
        _if_weights(
            {"not": {"enum": ["full", "none"]}}, {"anyOf": [{"type": "null"}, with_weights]}
        ),
    ]
    return body


def _if_weights(are: Schema, outputs: Schema) -> Schema:
    """Returns a schema for `outputs` that holds if `weights` has the schema `are`."""
    return {
        "if": {"required": ["weights"], "properties": {"weights": are}},
        "then": {"properties": {"outputs": outputs}},
    }


def gradients_request(variant: Variant) -> Schema:
    """Returns the schema of the JSON body of a request for gradients."""
    grad = _tensor(FLOATING, "Shape of the output; dtype of the inputs")
    return _body(variant, _fields(JobFields), {GRAD_OUTPUT: grad})


def _body(variant: Variant, fields: dict[str, Schema], more: Mapping[str, Schema]) -> Schema:
    """Returns the schema of a body with a variant's inputs, and `more` required inputs."""
    inputs = {
        i.name: _tensor(
            i.dtypes,
            f"({', '.join(i.letters)}){', broadcastable' * i.broadcasts}; {' or '.join(i.dtypes)}",
        )
        for i in variant.inputs.values()
    } | dict(more)
    needed = [i.name for i in variant.inputs.values() if not i.is_optional] + list(more)
    fields["parameters"] = _parameters(variant)
    rules: Schema = {"properties": {"inputs": {"required": needed}}}
    if roles := [r for r in ROLES if r in variant.inputs]:
        x = _tensor(
            variant.inputs[roles[0]].dtypes,
            f"(B, L, M) or (L, M), with a layer: replaces {', '.join(roles)}",
        )
        inputs = {"x": x} | inputs
        fields["layer"] |= {"anyOf": [ref("Layer"), {"type": "null"}]}
        rules = {
            "if": {"required": ["layer"], "properties": {"layer": {"type": "object"}}},
            "then": {"properties": {"inputs": _layered(roles, needed)}},
            "else": {"properties": {"inputs": {"required": needed, "properties": {"x": False}}}},
        }
    else:
        fields["layer"] = {"type": "null", "description": "This variant takes no layer."}
    body = closed({"inputs": closed(inputs, ()), **fields, "encoding": _ENCODING}, ["inputs"])
    return body | {"allOf": [rules]}


def response(variant: Variant) -> Schema:
    """Returns the schema of the JSON response of a run."""
    outputs = {
        o.name: _tensor(
            ("float64", "float32") if o.is_exact else FLOATING, f"({', '.join(o.letters)})"
        )
        for o in variant.outputs.values()
    }
    if (weights := variant.outputs.get("weights")) is not None:
        outputs |= _form_tensors(weights)
    fields = {
        "variant": {"const": variant.name},
        "outputs": closed(outputs, ()) | {"minProperties": 1},
        "timing": ref("Timing"),
    }
    marks = {
        "weights_are": _KINDS
        | {"description": "The kind of the weights, if the response has them."}
    }
    return closed(fields | marks, fields)


def _form_tensors(weights: Output) -> dict[str, Schema]:
    """Returns the tensors of all forms of the weights, including the full weights."""
    shapes: dict[str, list[str]] = {"weights": [f"({', '.join(weights.letters)})"]}
    dtypes: dict[str, tuple[str, ...]] = {}
    for kind in weight_forms.KINDS:
        if kind == "rows" and weight_forms.query_axis(weights) is None:
            continue
        for name, part in weight_forms.form_tensors(kind, weights).items():
            shapes.setdefault(name, []).append(f"{kind}: ({', '.join(part.letters)})")
            dtypes[name] = ("int64",) if part.is_integer else ("float64", "float32")
    return {name: _tensor(dtypes[name], "; ".join(shapes[name])) for name in shapes}


def gradients_response(variant: Variant) -> Schema:
    """Returns the schema of the JSON response with gradients."""
    inputs = [i.name for i in variant.inputs.values() if set(i.dtypes) & set(FLOATING)]
    gradients = {n: _tensor(FLOATING, f"Shape and dtype of {n}") for n in inputs}
    if any(role in variant.inputs for role in ROLES):
        gradients["x"] = _tensor(FLOATING, "Shape and dtype of x")
        for layout in LAYOUTS.values():
            spelled = [s for role in ROLES for s in SPELLINGS[role]]
            names = [s + suffix for s in spelled for suffix in layout.SUFFIXES]
            gradients |= {
                n: _tensor(FLOATING, "Shape and dtype of the layer's tensor") for n in names
            }
    return closed(
        {
            "variant": {"const": variant.name},
            "gradients": closed(gradients, ()) | {"minProperties": 1},
            "timing": ref("Timing"),
        }
    )


def convert_request() -> Schema:
    """Returns the schema of the JSON body of a conversion."""
    fields = _fields(ConvertFields)
    fields["from"] |= _LAYOUT
    fields["to"] |= _LAYOUT
    every = {"from": fields.pop("from"), "to": fields.pop("to"), "tensors": {"type": "object"}}
    body = closed(every | fields | {"encoding": _ENCODING}, list(every))
    return body | {"oneOf": _per_layout("from")}


def convert_response() -> Schema:
    """Returns the schema of the JSON response of a conversion."""
    size = {"anyOf": [{"type": "number", "minimum": 0}, _TEXT | {"enum": ["NaN", "Infinity"]}]}
    check = {
        "largest_absolute_difference": size,
        "largest_absolute_output": size,
        "elements": _COUNT,
        "dtype": {"const": "float64"},
    }
    body = closed(
        {"from": _LAYOUT, "to": _LAYOUT, "tensors": {"type": "object"}, "check": closed(check)}
    )
    return body | {"oneOf": _per_layout("to")}


def _catalogue_entry() -> Schema:
    """Returns the schema of a variant in the catalogue."""
    letters = {"type": "array", "items": _TEXT, "description": "One letter per axis."}
    flag = {"type": "boolean"}
    dtypes = {"type": "array", "items": _TEXT | {"enum": list(DTYPES)}}
    taken = closed({"shape": letters, "broadcasts": flag, "dtypes": dtypes, "optional": flag})
    given = closed({"shape": letters, "dtype": _TEXT})
    words = ("variant", "summary", "formula", "paper", "cost", "weights")
    return closed(
        dict.fromkeys(words, _TEXT)
        | {
            "inputs": {"type": "object", "additionalProperties": taken},
            "parameters": {"type": "object", "description": "A JSON schema."},
            "refuses": {
                "type": "object",
                "additionalProperties": _TEXT,
                "description": "Parameters that this variant rejects, with the reason.",
            },
            "outputs": {"type": "object", "additionalProperties": given},
            "gradients": {
                "type": "array",
                "items": _TEXT,
                "description": "Inputs that have gradients; empty if the variant has none.",
            },
            "picture": {
                "type": ["string", "null"],
                "description": "Path of a picture of its weights; null: no picture.",
            },
        }
    )


def closed(properties: Mapping[str, Any], required: Iterable[str] | None = None) -> Schema:
    """Returns the schema of an object with these properties only; by default all are required."""
    needed = list(properties if required is None else required)
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    } | ({"required": needed} if needed else {})


def _tensor(dtypes: Iterable[str], description: str) -> Schema:
    """Returns the schema of a tensor of one of these dtypes, as lists or base64."""
    known = list(dtypes)
    lists = [ref("Numbers")] if set(known) & set(FLOATING) else [ref("WholeNumbers")]
    if "bool" in known:
        lists.append(ref("Booleans"))
    base64 = ref("Base64") | {"properties": {"dtype": {"enum": known}}}
    return {"description": description, "anyOf": [*lists, base64]}


def _lists(of: str, description: str, *leaves: Schema) -> dict[str, Schema]:
    nested = {"type": "array", "items": ref(of)}
    return {of: {"description": description, "anyOf": [*leaves, nested]}}


def _fields(model: type[pydantic.BaseModel]) -> dict[str, Schema]:
    """Returns the properties of a model without titles, which only repeat the names."""
    schema = model.model_json_schema()
    assert "$defs" not in schema, "they are plain values"
    properties: dict[str, Schema] = schema.get("properties", {})
    for field in properties.values():
        field.pop("title", None)
    return properties


def _parameters(variant: Variant) -> Schema:
    refused = "".join(f" {name} is rejected: {why}." for name, why in variant.refuses.items())
    properties = _fields(variant.parameters)
    needed = [n for n, f in variant.parameters.model_fields.items() if f.is_required()]
    return closed(properties, needed) | {"description": f"Parameters of {variant.name}.{refused}"}


def _layered(roles: list[str], needed: list[str]) -> Schema:
    """Returns the rule for `inputs` with a layer: x, or the inputs that it replaces."""
    rest = [n for n in needed if n not in roles]
    alone = {"required": rest, "properties": dict.fromkeys(roles, False)}
    return {"if": {"required": ["x"]}, "then": alone, "else": {"required": needed}}


def _per_layout(field: str) -> list[Schema]:
    """Returns the schemas of tensors for each layout in a field."""
    return [
        {"properties": {field: {"const": name}, "tensors": ref(f"Weights{name.upper()}")}}
        for name in LAYOUTS
    ]


def _weights(layout: Layout) -> Schema:
    """Returns the schema of a layer's tensors: each role once, in one of its spellings."""
    first, *others = layout.SUFFIXES
    spelled = [s + suffix for role in ROLES for s in SPELLINGS[role] for suffix in layout.SUFFIXES]
    body = closed({name: _tensor(FLOATING, "") for name in spelled}, ())
    once = [{"oneOf": [{"required": [s + first]} for s in SPELLINGS[role]]} for role in ROLES]
    beside = {s + o: [s + first] for role in ROLES for s in SPELLINGS[role] for o in others}
    return body | {"allOf": once} | ({"dependentRequired": beside} if beside else {})


def _layer() -> Schema:
    """Returns the schema of a layer in a request."""
    heads = _fields(LayerFields)["heads"]
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
        _TEXT | {"enum": _NON_FINITE},
    ),
    **_lists("WholeNumbers", "Nested lists of integers, not ragged.", {"type": "integer"}),
    **_lists("Booleans", "Nested lists of booleans, not ragged.", {"type": "boolean"}),
    "Base64": {
        "description": "Little-endian, row-major bytes in base64, to match dtype and shape.",
        **closed(
            {
                "dtype": _TEXT | {"enum": list(DTYPES)},
                "shape": {"type": "array", "maxItems": 8, "items": _COUNT},
                "data": {"type": "string", "contentEncoding": "base64", "pattern": _BASE64},
            }
        ),
    },
    "Layer": _layer(),
    **{f"Weights{name.upper()}": _weights(layout) for name, layout in LAYOUTS.items()},
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
                "flops": _COUNT | {"description": "Of the matrix products."},
                "bytes": _COUNT | {"description": "Of all input and output tensors."},
            }
        ),
    },
    "Problem": {
        "description": "A problem document (RFC 9457).",
        **closed(
            {
                "type": {"type": "string", "description": "The kind of problem; stable."},
                "title": _TEXT,
                "status": {"type": "integer"},
                "detail": {"type": "string", "description": "The received and the expected value."},
                "pointer": {
                    "type": "string",
                    "description": "JSON pointer to the invalid part of the request.",
                },
                "limit": _COUNT | {"description": "The exceeded limit, with 413."},
            },
            ("type", "title", "status", "detail"),
        ),
    },
    "Variant": _catalogue_entry(),
}
"""The referenced schemas, by name."""

TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that the request may be queued. After them it does not run.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000},
}
"""The header parameter of every operation that runs jobs."""
