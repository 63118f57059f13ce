"""The operations of runs and gradients in the OpenAPI document. `run` registers them.

Their schemas follow from the variants and the fields of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qkv.api.openapi.operation import (
    SERVER_TIMING,
    TIMEOUT,
    describe,
    in_both_formats,
    problem_responses,
)
from qkv.api.openapi.schemas import (
    ENCODING,
    NOTES,
    TIMING,
    Schema,
    closed,
    either,
    enumeration,
    list_of,
    model_fields,
    named,
    nullable,
    pascal,
    say_default,
    tensor_of,
)
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import TAIL, Output
from qkv.attention.variant import Variant
from qkv.attention.variant_file import WEIGHT_KINDS
from qkv.jobs import weight_forms
from qkv.jobs.fields import JobFields
from qkv.jobs.gradient_plan import GRAD_OUTPUT
from qkv.jobs.run_fields import RunFields
from qkv.jobs.state import GRAD_SUMS, SUMS
from qkv.tensors import FLOATING

__all__ = [
    "ANY_LAYOUT",
    "LAYER",
    "LAYER_TENSORS",
    "LAYOUT",
    "describe_gradients",
    "describe_run",
    "input_schemas",
    "parameters",
]

_LAYOUTS: Final = list(layout_catalogue.known())
LAYOUT: Final = enumeration("Layout", _LAYOUTS)
ANY_LAYOUT: Final = enumeration("LayoutOrAuto", [*_LAYOUTS, layout_catalogue.AUTO])
LAYER_TENSORS: Final = named(
    "LayerTensors",
    {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": tensor_of(FLOATING, "A matrix or a vector"),
        "description": "The tensors of a layer, by name. The modules of each layout: "
        + "; ".join(
            f"{name}: {', '.join(layout.modules)}"
            for name, layout in layout_catalogue.known().items()
        )
        + ".",
    },
)
_FIELDS: Final = model_fields(LayerOptions)
_OF_CHECKPOINT: Final = ("layout", "prefix")
LAYER: Final = named(
    "AnyLayer",
    either(
        named(
            "Layer",
            closed(
                _FIELDS | {"layout": ANY_LAYOUT, "tensors": LAYER_TENSORS}, ["layout", "tensors"]
            )
            | {"description": "A layer that projects the inputs."},
        ),
        named(
            "NamedLayer",
            closed(
                {"name": {"type": "string", "description": "As GET /v1/layers lists it."}}
                | {n: schema for n, schema in _FIELDS.items() if n not in _OF_CHECKPOINT},
                ["name"],
            )
            | {
                "description": "A layer that the service has loaded. Other fields replace those of "
                "its checkpoint."
            },
        ),
    ),
)
_COUNT: Final = {"type": ["integer", "null"], "minimum": 1}
_LAYER_READ: Final = named(
    "LayerRead",
    closed(
        {
            "layout": LAYOUT,
            "prefix": {"type": "string"},
            "heads": _COUNT,
            "kv_heads": _COUNT,
            "ignored": list_of({"type": "string"}),
            "name": {"type": "string", "description": "Of a loaded layer."},
        },
        ["layout", "prefix", "heads", "kv_heads", "ignored"],
    )
    | {
        "description": "The layer of the request: its layout, the prefix of its names, its heads, "
        "and the names of tensors that belong to no part of the attention."
    },
)
_KINDS: Final = enumeration("WeightsKind", WEIGHT_KINDS)


def describe_run(variant: Variant) -> dict[str, Any]:
    """Returns the description of the operation that runs a variant."""
    fields = model_fields(RunFields)
    groups = variant.groups.items()
    known = [*variant.outputs, *(n for group, specs in groups for n in (group, *specs))]
    names = enumeration(f"{pascal(variant.name)}OutputName", known)
    fields["outputs"] = nullable(list_of(names, minItems=1, uniqueItems=True)) | {
        "description": fields["outputs"]["description"]
    }
    weights = variant.outputs.get("weights")
    fields["weights"] = (
        enumeration("NoWeights", ["full", "none"]) if weights is None else _weight_forms(weights)
    )
    response = _response(variant, pascal(variant.name), "outputs", _outputs(variant))
    return _operation(_request(variant, pascal(variant.name), fields, {}), response, "outputs")


def describe_gradients(variant: Variant) -> dict[str, Any]:
    """Returns the description of the operation that computes a variant's gradients."""
    grad = tensor_of(FLOATING, "Shape of the output; dtype of the inputs")
    name = f"{pascal(variant.name)}Gradients"
    request = _request(variant, name, model_fields(JobFields), {GRAD_OUTPUT: grad})
    inputs = [i.name for i in variant.inputs.values() if set(i.dtypes) & set(FLOATING)]
    inputs += [SUMS] if variant.state else []
    tensors = {n: tensor_of(FLOATING, f"Shape and dtype of {n}") for n in inputs}
    gradients = closed(tensors, ())
    if _roles(variant):
        gradients["properties"]["x"] = tensor_of(FLOATING, "Shape and dtype of x")
        gradients["additionalProperties"] = tensor_of(
            FLOATING, "Shape and dtype of the layer's tensor"
        )
    return _operation(request, _response(variant, name, "gradients", gradients), "gradients")


def _operation(request: Schema, response: Schema, noun: str) -> dict[str, Any]:
    """Returns an operation that runs a variant; `noun` is the field of its tensors."""
    body = in_both_formats(
        "Tensors, parameters, and the requested outputs.",
        request,
        "The inputs by name, the tensors of a layer as `layer.<name>`; all other fields as JSON "
        "under `qkv` in the metadata.",
    )
    good = in_both_formats(
        f"The requested {noun}, and the timing.",
        response,
        f"The {noun} by name; `variant` and `timing` as JSON under `qkv` in the metadata.",
    )
    statuses = (400, 406, 413, 415, 422, 429, 500, 503, 504)
    responses = {"200": good | {"headers": SERVER_TIMING}} | problem_responses(*statuses)
    return describe(responses, body, [TIMEOUT])


def _roles(variant: Variant) -> list[str]:
    """Returns the inputs that a layer can project."""
    return [role for role in ROLES if role in variant.inputs]


def input_schemas(variant: Variant) -> dict[str, Schema]:
    """Returns the schema of each input."""
    return {
        i.name: tensor_of(
            i.dtypes,
            f"({', '.join(i.letters)}){', broadcastable' * i.broadcasts}"
            f"{', last axis optional' * i.may_omit_last}; {' or '.join(i.dtypes)}",
        )
        for i in variant.tensors.values()
    }


def _request(
    variant: Variant, name: str, fields: dict[str, Schema], more: Mapping[str, Schema]
) -> Schema:
    """Returns the schema of a body: without a layer, or with one.

    Args:
        variant: the variant.
        name: the beginning of the names of its components.
        fields: the fields beside the inputs.
        more: required inputs beside those of the variant.
    """
    tensors = input_schemas(variant) | dict(more)
    if variant.state is not None and more:  # gradients
        tensors = {n: x for n, x in tensors.items() if not n.startswith(TAIL)}
        tensors[GRAD_SUMS] = tensor_of(("float64", "float32"), f"Shape of {SUMS}")
    needed = [i.name for i in variant.inputs.values() if not i.is_optional] + list(more)
    fields = {**fields, "parameters": parameters(variant), "encoding": ENCODING}
    inputs = named(f"{name}Inputs", closed(tensors, needed))
    no_layer = {"type": "null", "description": "None: the inputs are not projected."}
    plain = closed(fields | {"inputs": inputs, "layer": no_layer}, ["inputs"])
    request = named(f"{name}Request", plain)
    if not (roles := _roles(variant)):
        return request
    x = tensor_of(
        variant.inputs[roles[0]].dtypes, f"(B, L, M) or (L, M): replaces {', '.join(roles)}"
    )
    rest = {n: schema for n, schema in tensors.items() if n not in roles}
    embeddings = named(
        f"{name}Embeddings", closed({"x": x} | rest, ["x", *(n for n in needed if n in rest)])
    )
    projected = fields | {"inputs": either(embeddings, inputs), "layer": LAYER}
    return either(request, named(f"{name}ProjectedRequest", closed(projected, ["inputs", "layer"])))


def _weight_forms(weights: Output) -> Schema:
    """Returns the schema of the form of the weights, with a component for each kind."""
    schema = say_default(weight_forms.schema(weights))
    text, *objects = schema["anyOf"]
    kinds = [named(f"Weights{pascal(*o['properties'])}", o) for o in objects]
    name = "WeightsForm" if weight_forms.query_axis(weights) is not None else "ShortWeightsForm"
    return named(name, schema | {"anyOf": [enumeration("WeightsFormName", text["enum"]), *kinds]})


def _response(variant: Variant, name: str, group: str, tensors: Schema) -> Schema:
    """Returns the schema of a response; `group` is the field of its tensors."""
    fields = {
        "variant": {"const": variant.name},
        group: named(f"{name}Tensors", tensors | {"minProperties": 1}),
        "timing": TIMING,
    }
    optional = {}
    if group == "outputs":
        about = "The kind of the weights, if the response has them."
        optional["weights_are"] = _KINDS | {"description": about}
    if _roles(variant):
        optional["layer"] = _LAYER_READ
        optional["notes"] = list_of({"type": "string"}, description=f"{NOTES}.")
    return named(f"{name}Response", closed(fields | optional, fields))


def _outputs(variant: Variant) -> Schema:
    """Returns the schema of the outputs, with the tensors of all forms of the weights."""
    exact = ("float64", "float32")
    outputs = {
        o.name: tensor_of(exact if o.is_exact else FLOATING, f"({', '.join(o.letters)})")
        for o in variant.outputs.values()
    }
    for specs in variant.groups.values():
        outputs |= {
            name: tensor_of(spec.dtypes, f"({', '.join(spec.letters)})", len(spec.letters))
            for name, spec in specs.items()
        }
    if (weights := variant.outputs.get("weights")) is None:
        return closed(outputs, ())
    shapes: dict[str, list[str]] = {"weights": [f"({', '.join(weights.letters)})"]}
    dtypes: dict[str, tuple[str, ...]] = {}
    for kind in weight_forms.KINDS:
        if kind == "rows" and weight_forms.query_axis(weights) is None:
            continue
        for name, part in weight_forms.form_tensors(kind, weights).items():
            shapes.setdefault(name, []).append(f"{kind}: ({', '.join(part.letters)})")
            dtypes[name] = ("int64",) if part.is_integer else exact
    forms = {name: tensor_of(dtypes[name], "; ".join(shapes[name])) for name in shapes}
    return closed(outputs | forms, ())


def parameters(variant: Variant) -> Schema:
    """Returns the schema of a variant's parameters."""
    refused = "".join(f" {name} is rejected: {why}." for name, why in variant.refuses.items())
    properties = model_fields(variant.parameters)
    needed = [n for n, f in variant.parameters.model_fields.items() if f.is_required()]
    about = {"description": f"Parameters of {variant.name}.{refused}"}
    return named(f"{pascal(variant.name)}Parameters", closed(properties, needed) | about)
