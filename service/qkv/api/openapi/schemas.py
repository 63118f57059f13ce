"""JSON schemas of bodies, made of what the variants and the wire formats say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pydantic

from qkv.api.job_runner import TIMEOUT_HEADER
from qkv.attention.catalogue import Output, Variant
from qkv.attention.layers.layouts import LAYOUTS, Layout
from qkv.attention.layers.projections import ROLES, SPELLINGS
from qkv.jobs import weight_forms
from qkv.jobs.convert import ConvertFields
from qkv.jobs.fields import JobFields, LayerFields
from qkv.jobs.gradient_job import GRAD_OUTPUT
from qkv.jobs.job import RunFields
from qkv.tensors import DTYPES, FLOATING

__all__ = [
    "COMPONENTS",
    "TIMEOUT",
    "answer",
    "closed",
    "conversion",
    "converted",
    "gradients_answer",
    "gradients_request",
    "ref",
    "request",
]

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_KINDS: Final[Schema] = _TEXT | {"enum": ["stochastic", "signed", "unnormalised"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_LAYOUT: Final[Schema] = _TEXT | {"enum": list(LAYOUTS)}
_NON_FINITE: Final = ["NaN", "Infinity", "-Infinity"]
_BASE64: Final = "^[A-Za-z0-9+/]*={0,2}$"
_ENCODING: Final[Schema] = {
    "type": ["string", "null"],
    "enum": ["lists", "base64", None],
    "default": None,
    "description": "How the answer's tensors are written in JSON; null: as the first one came.",
}


def ref(component: str) -> Schema:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{component}"}


def request(variant: Variant) -> Schema:
    """The JSON body of a run of this variant."""
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
        _where_weights({"const": "none"}, {"anyOf": [{"type": "null"}, {"not": with_weights}]}),
        _where_weights(
            {"not": {"enum": ["full", "none"]}}, {"anyOf": [{"type": "null"}, with_weights]}
        ),
    ]
    return body


def _where_weights(are: Schema, outputs: Schema) -> Schema:
    """What `outputs` must be where `weights` is that."""
    return {
        "if": {"required": ["weights"], "properties": {"weights": are}},
        "then": {"properties": {"outputs": outputs}},
    }


def gradients_request(variant: Variant) -> Schema:
    """The JSON body that asks for this variant's gradients."""
    grad = _tensor(FLOATING, "As the output is; in the inputs' dtype")
    return _body(variant, _fields(JobFields), {GRAD_OUTPUT: grad})


def _body(variant: Variant, fields: dict[str, Schema], more: Mapping[str, Schema]) -> Schema:
    """A body with a variant's inputs, and more that are needed beside them."""
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
            f"(B, L, M) or (L, M), with a layer: stands for {', '.join(roles)}",
        )
        inputs = {"x": x} | inputs
        fields["layer"] |= {"anyOf": [ref("Layer"), {"type": "null"}]}
        rules = {
            "if": {"required": ["layer"], "properties": {"layer": {"type": "object"}}},
            "then": {"properties": {"inputs": _layered(roles, needed)}},
            "else": {"properties": {"inputs": {"required": needed, "properties": {"x": False}}}},
        }
    else:
        fields["layer"] = {"type": "null", "description": "This variant takes none."}
    body = closed({"inputs": closed(inputs, ()), **fields, "encoding": _ENCODING}, ["inputs"])
    return body | {"allOf": [rules]}


def answer(variant: Variant) -> Schema:
    """The JSON body that a run of this variant is answered with."""
    outputs = {
        o.name: _tensor(
            ("float64", "float32") if o.is_exact else FLOATING, f"({', '.join(o.letters)})"
        )
        for o in variant.outputs.values()
    }
    if (weights := variant.outputs.get("weights")) is not None:
        outputs |= _digests(weights)
    fields = {
        "variant": {"const": variant.name},
        "outputs": closed(outputs, ()) | {"minProperties": 1},
        "timing": ref("Timing"),
    }
    marks = {"weights_are": _KINDS | {"description": "What the weights are, where they came."}}
    return closed(fields | marks, fields)


def _digests(weights: Output) -> dict[str, Schema]:
    """What stands beside the weights, or in their place, in the forms that are not the whole."""
    shapes: dict[str, list[str]] = {"weights": [f"({', '.join(weights.letters)})"]}
    dtypes: dict[str, tuple[str, ...]] = {}
    for kind in weight_forms.KINDS:
        if kind == "rows" and weight_forms.query_axis(weights) is None:
            continue
        for name, part in weight_forms.form_tensors(kind, weights).items():
            shapes.setdefault(name, []).append(f"{kind}: ({', '.join(part.letters)})")
            dtypes[name] = ("int64",) if part.is_integer else ("float64", "float32")
    return {name: _tensor(dtypes[name], "; ".join(shapes[name])) for name in shapes}


def gradients_answer(variant: Variant) -> Schema:
    """The JSON body that a request for gradients is answered with."""
    inputs = [i.name for i in variant.inputs.values() if set(i.dtypes) & set(FLOATING)]
    gradients = {n: _tensor(FLOATING, f"As {n} came") for n in inputs}
    if any(role in variant.inputs for role in ROLES):
        gradients["x"] = _tensor(FLOATING, "As x came")
        for layout in LAYOUTS.values():
            spelled = [s for role in ROLES for s in SPELLINGS[role]]
            names = [s + suffix for s in spelled for suffix in layout.SUFFIXES]
            gradients |= {n: _tensor(FLOATING, "As the layer has it") for n in names}
    return closed(
        {
            "variant": {"const": variant.name},
            "gradients": closed(gradients, ()) | {"minProperties": 1},
            "timing": ref("Timing"),
        }
    )


def conversion() -> Schema:
    """The JSON body of a conversion."""
    fields = _fields(ConvertFields)
    fields["from"] |= _LAYOUT
    fields["to"] |= _LAYOUT
    every = {"from": fields.pop("from"), "to": fields.pop("to"), "tensors": {"type": "object"}}
    body = closed(every | fields | {"encoding": _ENCODING}, list(every))
    return body | {"oneOf": _per_layout("from")}


def converted() -> Schema:
    """The JSON body that a conversion is answered with."""
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
    """What the catalogue says of a variant."""
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
                "description": "Parameters that have no meaning here, with the reason.",
            },
            "outputs": {"type": "object", "additionalProperties": given},
            "gradients": {
                "type": "array",
                "items": _TEXT,
                "description": "Inputs that have gradients; none where the variant has none.",
            },
            "picture": {
                "type": ["string", "null"],
                "description": "Path of a picture of its weights; null: there is none.",
            },
        }
    )


def closed(properties: Mapping[str, Any], required: Iterable[str] | None = None) -> Schema:
    """An object with these properties, all of them required if nothing is said, and no other."""
    needed = list(properties if required is None else required)
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    } | ({"required": needed} if needed else {})


def _tensor(dtypes: Iterable[str], description: str) -> Schema:
    """A tensor of one of these dtypes, in both forms."""
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
    """A model's properties, without the titles that only repeat their names."""
    schema = model.model_json_schema()
    assert "$defs" not in schema, "they are plain values"
    properties: dict[str, Schema] = schema.get("properties", {})
    for field in properties.values():
        field.pop("title", None)
    return properties


def _parameters(variant: Variant) -> Schema:
    refused = "".join(f" {name} is refused: {why}." for name, why in variant.refuses.items())
    properties = _fields(variant.parameters)
    needed = [n for n, f in variant.parameters.model_fields.items() if f.is_required()]
    return closed(properties, needed) | {"description": f"What {variant.name} takes.{refused}"}


def _layered(roles: list[str], needed: list[str]) -> Schema:
    """What must stand in `inputs` beside a layer: x, or what it stands for."""
    rest = [n for n in needed if n not in roles]
    alone = {"required": rest, "properties": dict.fromkeys(roles, False)}
    return {"if": {"required": ["x"]}, "then": alone, "else": {"required": needed}}


def _per_layout(field: str) -> list[Schema]:
    """The tensors of the layout that a field names."""
    return [
        {"properties": {field: {"const": name}, "tensors": ref(f"Weights{name.upper()}")}}
        for name in LAYOUTS
    ]


def _weights(layout: Layout) -> Schema:
    """A layer's tensors in a layout: each role once, in one of its spellings."""
    first, *others = layout.SUFFIXES
    spelled = [s + suffix for role in ROLES for s in SPELLINGS[role] for suffix in layout.SUFFIXES]
    body = closed({name: _tensor(FLOATING, "") for name in spelled}, ())
    once = [{"oneOf": [{"required": [s + first]} for s in SPELLINGS[role]]} for role in ROLES]
    beside = {s + o: [s + first] for role in ROLES for s in SPELLINGS[role] for o in others}
    return body | {"allOf": once} | ({"dependentRequired": beside} if beside else {})


def _layer() -> Schema:
    """A layer that stands in a request."""
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
    "queue_ms": "Waiting for the device.",
    "transfer_ms": "Tensors to the device and back.",
    "compute_ms": "The variant itself, and its layer.",
    "total_ms": "From the body's last byte to the answer.",
}

COMPONENTS: Final[dict[str, Schema]] = {
    **_lists(
        "Numbers",
        'Nested lists of numbers, none ragged; "NaN", "Infinity" and "-Infinity" stand for what '
        "JSON lacks.",
        {"type": "number"},
        _TEXT | {"enum": _NON_FINITE},
    ),
    **_lists("WholeNumbers", "Nested lists of whole numbers, none ragged.", {"type": "integer"}),
    **_lists("Booleans", "Nested lists of booleans, none ragged.", {"type": "boolean"}),
    "Base64": {
        "description": "Little-endian, row-major bytes in base64, as many as dtype and shape say.",
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
        "description": "Times are measured, in milliseconds; flops and bytes are counted.",
        **closed(
            {
                **{
                    name: {"type": "number", "minimum": 0, "description": what}
                    for name, what in _TIMES.items()
                },
                "batch_size": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Requests that ran together, this one among them.",
                },
                "device": {"type": "string", "description": "Where it ran."},
                "backend": {"type": "string", "description": "Which of the variant's paths ran."},
                "flops": _COUNT | {"description": "Of the matrix products."},
                "bytes": _COUNT | {"description": "Of all tensors in and out."},
            }
        ),
    },
    "Problem": {
        "description": "A problem document (RFC 9457).",
        **closed(
            {
                "type": {"type": "string", "description": "Says which problem; stable."},
                "title": _TEXT,
                "status": {"type": "integer"},
                "detail": {"type": "string", "description": "What came, what was expected."},
                "pointer": {"type": "string", "description": "JSON pointer to what is at fault."},
                "limit": _COUNT | {"description": "The limit that was passed, with 413."},
            },
            ("type", "title", "status", "detail"),
        ),
    },
    "Variant": _catalogue_entry(),
}
"""What the schemas refer to, by name."""

TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that it may wait for its turn; past them it never runs.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000},
}
"""The parameter of whatever is run."""
