"""JSON schemas of the bodies and responses of runs and gradients.

They are derived from the variants and the fields of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qkv.api.openapi.schemas import ENCODING, TEXT, Schema, closed, model_fields, ref, tensor
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Output
from qkv.attention.variant import Variant
from qkv.attention.variant_file import WEIGHT_KINDS
from qkv.jobs import weight_forms
from qkv.jobs.fields import JobFields
from qkv.jobs.gradient_plan import GRAD_OUTPUT
from qkv.jobs.run_fields import RunFields
from qkv.tensors import FLOATING

__all__ = ["gradients_request", "gradients_response", "parameters", "request", "response"]

_KINDS: Final[Schema] = TEXT | {"enum": list(WEIGHT_KINDS)}


def request(variant: Variant) -> Schema:
    """Returns the schema of the JSON body of a run."""
    body = _body(variant, model_fields(RunFields), {})
    body["properties"]["outputs"] |= {
        "anyOf": [
            {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": TEXT | {"enum": list(variant.outputs)},
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
    """Returns a schema that restricts `outputs` if `weights` has the schema `are`."""
    return {
        "if": {"required": ["weights"], "properties": {"weights": are}},
        "then": {"properties": {"outputs": outputs}},
    }


def gradients_request(variant: Variant) -> Schema:
    """Returns the schema of the JSON body of a request for gradients."""
    grad = tensor(FLOATING, "Shape of the output; dtype of the inputs")
    return _body(variant, model_fields(JobFields), {GRAD_OUTPUT: grad})


def _body(variant: Variant, fields: dict[str, Schema], more: Mapping[str, Schema]) -> Schema:
    """Returns the schema of a body with a variant's inputs, and `more` required inputs."""
    inputs = {
        i.name: tensor(
            i.dtypes,
            f"({', '.join(i.letters)}){', broadcastable' * i.broadcasts}; {' or '.join(i.dtypes)}",
        )
        for i in variant.inputs.values()
    } | dict(more)
    needed = [i.name for i in variant.inputs.values() if not i.is_optional] + list(more)
    fields["parameters"] = parameters(variant)
    rules: Schema = {"properties": {"inputs": {"required": needed}}}
    if roles := [r for r in ROLES if r in variant.inputs]:
        x = tensor(
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
    body = closed({"inputs": closed(inputs, ()), **fields, "encoding": ENCODING}, ["inputs"])
    return body | {"allOf": [rules]}


def response(variant: Variant) -> Schema:
    """Returns the schema of the JSON response of a run."""
    outputs = {
        o.name: tensor(
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
    annotations = {
        "weights_are": _KINDS
        | {"description": "The kind of the weights, if the response has them."}
    }
    if any(role in variant.inputs for role in ROLES):
        annotations["layer"] = ref("LayerRead")
    return closed(fields | annotations, fields)


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
    return {name: tensor(dtypes[name], "; ".join(shapes[name])) for name in shapes}


def gradients_response(variant: Variant) -> Schema:
    """Returns the schema of the JSON response with gradients."""
    inputs = [i.name for i in variant.inputs.values() if set(i.dtypes) & set(FLOATING)]
    gradients = {n: tensor(FLOATING, f"Shape and dtype of {n}") for n in inputs}
    if any(role in variant.inputs for role in ROLES):
        gradients["x"] = tensor(FLOATING, "Shape and dtype of x")
    named = closed(gradients, ()) | {"minProperties": 1}
    if any(role in variant.inputs for role in ROLES):
        named["additionalProperties"] = tensor(FLOATING, "Shape and dtype of the layer's tensor")
    fields = {
        "variant": {"const": variant.name},
        "gradients": named,
        "timing": ref("Timing"),
    }
    if any(role in variant.inputs for role in ROLES):
        return closed(fields | {"layer": ref("LayerRead")}, fields)
    return closed(fields)


def parameters(variant: Variant) -> Schema:
    """Returns the schema of a variant's parameters."""
    refused = "".join(f" {name} is rejected: {why}." for name, why in variant.refuses.items())
    properties = model_fields(variant.parameters)
    needed = [n for n, f in variant.parameters.model_fields.items() if f.is_required()]
    return closed(properties, needed) | {"description": f"Parameters of {variant.name}.{refused}"}


def _layered(roles: list[str], needed: list[str]) -> Schema:
    """Returns the rule for `inputs` with a layer: x, or the inputs that it replaces."""
    rest = [n for n in needed if n not in roles]
    alone = {"required": rest, "properties": dict.fromkeys(roles, False)}
    return {"if": {"required": ["x"]}, "then": alone, "else": {"required": needed}}
