"""Parts of the models of bodies: layers, layouts, parameters and choices of variants, tensors.

Each is one component of the OpenAPI document. Where jobs describe what they refuse, a model takes
the JSON as it is, and `documented` has its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, create_model
from typing_extensions import TypeAliasType

from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.variant import Variant
from qkv.jobs.fields import LayerField
from qkv.tensors import FLOATING
from qkv.wire.tensor_types import (
    Encoding,
    IntegerTensor,
    MaskTensor,
    Tensor,
    TensorOfFiveAxes,
    enumeration,
)

CLOSED: Final = ConfigDict(extra="forbid")
_OF_CHECKPOINT: Final = ("layout", "prefix")

Fields = dict[str, Any]
"""The types and defaults of the fields of a model, by name, as `create_model` takes them."""


def of_catalogue(make: Callable[[], Any]) -> Callable[[], Any]:
    """Decorates a function that makes models of all variants: it makes them once for the same ones.

    A worker has those that its supervisor made before the fork.
    """
    of_variants = cache(lambda _: make())
    return lambda: of_variants(tuple(catalogue.variants().values()))


def documented(kind: Any, json_type: Any) -> Any:
    """Returns a type of Python whose JSON is described by another type."""
    return Annotated[kind, BeforeValidator(lambda value: value, json_schema_input_type=json_type)]


def pascal(name: str) -> str:
    """Returns the name of a variant as the beginning of a model's name."""
    return "".join(part.capitalize() for part in name.split("_"))


def closed(name: str, fields: Fields, doc: str | None = None) -> Any:
    """Returns a model with these fields only."""
    return create_model(name, __config__=CLOSED, __doc__=doc, **fields)


def optional(kind: Any, description: str | None = None) -> tuple[Any, Any]:
    return (kind, Field(default=None, description=description))


def required(kind: Any, description: str | None = None) -> tuple[Any, Any]:
    return (kind, Field(description=description))


def tensor_type(dtypes: Iterable[str], axes: int = 4) -> Any:
    """Returns the type of a tensor of one of these dtypes; only floating ones have five axes."""
    known = set(dtypes)
    if axes > 4:
        return TensorOfFiveAxes
    return MaskTensor if "bool" in known else Tensor if known & set(FLOATING) else IntegerTensor


Layout: Any = enumeration("Layout", *layout_catalogue.known())
AnyLayout: Any = enumeration("LayoutOrAuto", *layout_catalogue.known(), layout_catalogue.AUTO)
LayerTensors: Any = TypeAliasType(
    "LayerTensors",
    Annotated[
        dict[str, Annotated[Tensor, Field(description="A matrix or a vector")]],
        Field(
            min_length=1,
            description="The tensors of a layer, by name. The modules of each layout: "
            + "; ".join(
                f"{name}: {', '.join(layout.modules)}"
                for name, layout in layout_catalogue.known().items()
            )
            + ".",
        ),
    ],
)
encoding_field: Final = optional(
    Encoding | None,
    "Encoding of tensors in the JSON response. By default that of the first tensor of the request.",
)


class Layer(LayerOptions):
    """A layer that projects the inputs."""

    layout: Annotated[AnyLayout, Field(description=LayerOptions.model_fields["layout"].description)]
    tensors: LayerTensors


NamedLayer: Any = closed(
    "NamedLayer",
    {
        "name": required(str, "As GET /v1/layers lists it."),
        **{
            name: (field.annotation, field)
            for name, field in LayerOptions.model_fields.items()
            if name not in _OF_CHECKPOINT
        },
    },
    "A layer that the service has loaded. Other fields replace those of its checkpoint.",
)
AnyLayer: Any = TypeAliasType("AnyLayer", Layer | NamedLayer)


DocumentedLayer: Any = documented(LayerField, AnyLayer | None)
"""The field `layer` of a body."""


def input_fields(variant: Variant) -> Fields:
    """Returns the fields of the inputs of a variant, those of a state included."""
    return {
        i.name: (optional if i.is_optional or i.name not in variant.inputs else required)(
            tensor_type(i.dtypes),
            f"({', '.join(i.letters)}){', broadcastable' * i.broadcasts}"
            f"{', last axis optional' * i.may_omit_last}; {' or '.join(i.dtypes)}",
        )
        for i in variant.tensors.values()
    }


@cache
def parameters_of(variant: Variant) -> Any:
    """Returns the model of a variant's parameters."""
    refused = "".join(f" {name} is rejected: {why}." for name, why in variant.refuses.items())
    return create_model(
        f"{pascal(variant.name)}Parameters",
        __base__=variant.parameters,
        __doc__=f"Parameters of {variant.name}.{refused}",
    )


def choice_of(name: str, variants: Iterable[Variant]) -> Any:
    """Returns the type of a variant's name, or of a variant with its parameters."""
    known = list(variants)
    union: Any = enumeration(f"{name}Name", *(v.name for v in known))
    for variant in known:
        fields = {
            "variant": (Literal[variant.name], ...),
            "parameters": optional(parameters_of(variant)),
        }
        union = union | closed(f"{pascal(variant.name)}Choice", fields)
    return documented(Any, TypeAliasType(name, union))
