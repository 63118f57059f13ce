"""The models of runs and gradients: bodies and responses, made from each variant's signature.

They document. The plan of a run validates its body: a plan that is known proves that another body
with the same fields and shapes is valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal

import pydantic
from fastapi import Body
from pydantic import ConfigDict, Field, PlainValidator, create_model
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

from qkv.api.models import (
    CLOSED,
    AnyLayer,
    Fields,
    Layout,
    closed,
    encoding_field,
    input_fields,
    optional,
    parameters_of,
    pascal,
    required,
    tensor_type,
)
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import TAIL, Output
from qkv.attention.variant import Variant
from qkv.jobs import weight_forms
from qkv.jobs.fields import JobFields
from qkv.jobs.gradient_plan import GRAD_OUTPUT
from qkv.jobs.run_fields import RunFields
from qkv.jobs.state import GRAD_SUMS, SUMS
from qkv.tensors import FLOATING
from qkv.wire.responses import NOTES, Timing, WeightsKind
from qkv.wire.tensor_types import Tensor, enumeration

_FILLED: Final[Any] = {"minProperties": 1}
_EXACT: Final = ("float64", "float32")


def build(variants: Iterable[Variant]) -> None:
    """Builds the models of these variants."""
    for variant in variants:
        run_body(variant)
        run_response(variant)
        if variant.backward is not None:
            gradients_body(variant)
            gradients_response(variant)


class _Outputs(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra=_FILLED)


class LayerRead(pydantic.BaseModel):
    """The layer of the request, and the names of tensors that belong to no part of it."""

    model_config = CLOSED

    layout: Layout
    prefix: str
    heads: Annotated[int, Field(ge=1)] | None
    kv_heads: Annotated[int, Field(ge=1)] | None
    ignored: Annotated[
        list[str], Field(description="Tensors that belong to no part of the attention.")
    ]
    name: str | SkipJsonSchema[None] = Field(default=None, description="Of a loaded layer.")


_Count: Any = Annotated[int, Field(ge=1, lt=1 << 63)]
WeightsRows: Any = closed(
    "WeightsRows",
    {"rows": (Annotated[list[Annotated[int, Field(ge=0, lt=1 << 63)]], Field(min_length=1)], ...)},
)
WeightsTopK: Any = closed("WeightsTopK", {"top_k": (_Count, ...)})
WeightsPool: Any = closed("WeightsPool", {"pool": (_Count, ...)})
WeightsFormName: Any = enumeration("WeightsFormName", "full", "none", "stats")
NoWeights: Any = enumeration("NoWeights", "full", "none")
_FORMS: Final = (
    "The form of the weights. full: the whole matrix. none: no weights. {}top_k: the k largest "
    "weights of each row. pool: the matrix in bins, each summed over its keys and averaged over "
    'its queries. stats: statistics of each row and key instead of weights. Default: `"full"`.'
)
WeightsForm: Any = TypeAliasType(
    "WeightsForm",
    Annotated[
        WeightsFormName | WeightsRows | WeightsTopK | WeightsPool,
        Field(description=_FORMS.format("rows: chosen rows. ")),
    ],
)
ShortWeightsForm: Any = TypeAliasType(
    "ShortWeightsForm",
    Annotated[WeightsFormName | WeightsTopK | WeightsPool, Field(description=_FORMS.format(""))],
)


@cache
def run_body(variant: Variant) -> Any:
    """Returns the type of the body of a run, which its handler gets as a `ReceivedMessage`."""
    name, groups = pascal(variant.name), variant.groups.items()
    known = [*variant.outputs, *(n for group, specs in groups for n in (group, *specs))]
    names: Any = enumeration(f"{name}OutputName", *known)
    weights = variant.outputs.get("weights")
    form = (
        NoWeights
        if weights is None
        else WeightsForm
        if weight_forms.query_axis(weights) is not None
        else ShortWeightsForm
    )
    listed = Annotated[list[names], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
    fields = {
        "outputs": optional(listed | None, RunFields.model_fields["outputs"].description),
        "weights": optional(form),
    }
    return _body(variant, name, RunFields, fields, {})


@cache
def gradients_body(variant: Variant) -> Any:
    """Returns the type of the body of a request for gradients; otherwise as `run_body`."""
    grad = required(Tensor, "Shape of the output; dtype of the inputs")
    return _body(variant, f"{pascal(variant.name)}Gradients", JobFields, {}, {GRAD_OUTPUT: grad})


def _roles(variant: Variant) -> list[str]:
    """Returns the inputs that a layer can project."""
    return [role for role in ROLES if role in variant.inputs]


def _body(variant: Variant, name: str, base: type[JobFields], fields: Fields, more: Fields) -> Any:
    """Returns the type of a body: without a layer, or with one.

    Args:
        variant: the variant.
        name: the beginning of the names of its models.
        base: the fields that are not of one variant.
        fields: others, beside the inputs.
        more: required inputs beside those of the variant.
    """
    tensors = input_fields(variant) | more
    if variant.state is not None and more:  # gradients
        tensors = {n: x for n, x in tensors.items() if not n.startswith(TAIL)}
        tensors[GRAD_SUMS] = optional(Tensor, f"Shape of {SUMS}")
    inputs = closed(f"{name}Inputs", tensors)
    needed = any(f.is_required() for f in variant.parameters.model_fields.values())
    of_variant = parameters_of(variant)
    fields = {
        **fields,
        "parameters": (of_variant, ...) if needed else optional(of_variant),
        "encoding": encoding_field,
    }
    plain = create_model(
        f"{name}Request",
        __base__=base,
        inputs=(inputs, ...),
        layer=optional(None, "None: the inputs are not projected."),
        **fields,
    )
    json_type: Any = plain
    if roles := _roles(variant):
        x = required(
            tensor_type(variant.inputs[roles[0]].dtypes),
            f"(B, L, M) or (L, M): replaces {', '.join(roles)}",
        )
        rest = {n: kind for n, kind in tensors.items() if n not in roles}
        embeddings = closed(f"{name}Embeddings", {"x": x} | rest)
        json_type = plain | create_model(
            f"{name}ProjectedRequest",
            __base__=base,
            inputs=(embeddings | inputs, ...),
            layer=(AnyLayer, ...),
            **fields,
        )
    validator = PlainValidator(lambda body: body, json_schema_input_type=json_type)
    return Annotated[Any, validator, Body()]  # of a class pydantic would build a schema too


@cache
def run_response(variant: Variant) -> Any:
    """Returns the model of the response to a run, with the tensors of all forms of the weights."""
    outputs = {
        o.name: optional(
            tensor_type(_EXACT if o.is_exact else FLOATING), f"({', '.join(o.letters)})"
        )
        for o in variant.outputs.values()
    }
    for specs in variant.groups.values():
        outputs |= {
            name: optional(
                tensor_type(spec.dtypes, len(spec.letters)), f"({', '.join(spec.letters)})"
            )
            for name, spec in specs.items()
        }
    if (weights := variant.outputs.get("weights")) is not None:
        outputs |= _forms(weights)
    about = "The kind of the weights, if the response has them."
    more = {"weights_are": optional(WeightsKind, about)}
    return _response(variant, pascal(variant.name), "outputs", outputs, more)


def _forms(weights: Output) -> Fields:
    """Returns the tensors of all forms of the weights."""
    shapes: dict[str, list[str]] = {"weights": [f"({', '.join(weights.letters)})"]}
    dtypes: dict[str, tuple[str, ...]] = {}
    for kind in weight_forms.KINDS:
        if kind == "rows" and weight_forms.query_axis(weights) is None:
            continue
        for name, part in weight_forms.form_tensors(kind, weights).items():
            shapes.setdefault(name, []).append(f"{kind}: ({', '.join(part.letters)})")
            dtypes[name] = ("int64",) if part.is_integer else _EXACT
    return {name: optional(tensor_type(dtypes[name]), "; ".join(shapes[name])) for name in shapes}


class _LayerGradients(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra=_FILLED)
    __pydantic_extra__: dict[
        str, Annotated[Tensor, Field(description="Shape and dtype of the layer's tensor")]
    ] = Field(init=False)


@cache
def gradients_response(variant: Variant) -> Any:
    """Returns the model of the response to a request for gradients."""
    inputs = [i.name for i in variant.inputs.values() if set(i.dtypes) & set(FLOATING)]
    inputs += [SUMS] if variant.state else []
    tensors = {n: optional(Tensor, f"Shape and dtype of {n}") for n in inputs}
    base: Any = _Outputs
    if _roles(variant):
        tensors["x"] = optional(Tensor, "Shape and dtype of x")
        base = _LayerGradients
    return _response(
        variant, f"{pascal(variant.name)}Gradients", "gradients", tensors, {}, base=base
    )


def _response(
    variant: Variant, name: str, group: str, tensors: Fields, more: Fields, base: Any = _Outputs
) -> Any:
    """Returns the model of a response; `group` is the field of its tensors."""
    fields = {
        "variant": (Literal[variant.name], ...),
        group: (create_model(f"{name}Tensors", __base__=base, **tensors), ...),
        "timing": (Timing, ...),
    } | more
    if _roles(variant):
        fields["layer"] = optional(LayerRead)
        fields["notes"] = optional(list[str], f"{NOTES}.")
    return closed(f"{name}Response", fields)
