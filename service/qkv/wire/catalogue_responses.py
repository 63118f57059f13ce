"""The responses of `GET /v1/variants`: the variants, their inputs, outputs and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from qkv.wire.response import Count, Response, doc
from qkv.wire.tensor_types import Dtype

_Axes = Annotated[Sequence[str], doc("One letter per axis.")]


class InputDescription(Response):
    """An input of a variant."""

    shape: _Axes
    broadcasts: bool
    dtypes: Sequence[Dtype]
    optional: bool
    random: Annotated[bool, doc("True if a request without it gets one drawn at random.")]


class OutputDescription(Response):
    """An output of a variant, or a tensor of its state."""

    shape: _Axes
    dtype: str


class Step(Response):
    """A tensor between inputs and output."""

    name: Annotated[str, doc("The output is `steps.<name>`.")]
    axes: _Axes
    symbol: Annotated[str | None, doc("The part of the formula that it is.")]
    summary: str
    rows: Annotated[str | None, doc("The axis whose rows a reader follows one by one.")]
    needs: Annotated[
        Sequence[str],
        doc(
            "Inputs and parameters: the step exists if a request has one of them. Empty: it always "
            "exists."
        ),
    ]


class Steps(Response):
    """The tensors between inputs and output that `outputs` may name, and their bounds."""

    max_tokens: Annotated[Count, doc("The most queries, and the most keys.")]
    max_items: Annotated[Count, doc("The most items of the batch.")]
    max_bytes: Annotated[Count, doc("The most bytes of all steps together.")]
    names: Annotated[Sequence[Step], doc("In the order of computation.")]


class Variant(Response):
    """A variant in the catalogue."""

    variant: str
    summary: str
    formula: str
    paper: str
    cost: str
    weights: str
    inputs: Mapping[str, InputDescription]
    parameters: Annotated[Mapping[str, Any], doc("A JSON schema.")]
    refuses: Annotated[
        Mapping[str, str], doc("Parameters that this variant rejects, with the reason.")
    ]
    outputs: Mapping[str, OutputDescription]
    steps: Annotated[
        Steps | None,
        doc(
            "The tensors between inputs and output that `outputs` may name, and the bounds of "
            "requests for them; null if there are none."
        ),
    ]
    gradients: Annotated[
        Sequence[str], doc("Inputs that have gradients; empty if the variant has none.")
    ]
    picture: Annotated[str | None, doc("Path of a picture of its weights; null if there is none.")]


class Variants(Response):
    """Every variant."""

    variants: Sequence[Variant]
