"""The responses about layers: those of a model, those that are loaded, conversions, detections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from qkv.wire.response import Count, NonNegative, PositiveCount, Response, doc
from qkv.wire.tensor_types import FloatingDtype, Number, enumeration

RotaryOrder: Any = enumeration("RotaryOrder", "half", "interleaved")
_LayerInput: Any = enumeration("LayerInput", "attention", "residual")


class HeadCounts(Response):
    """Numbers of heads that the shapes of a layer allow."""

    heads: PositiveCount
    kv_heads: PositiveCount
    width: PositiveCount


class FittingLayout(Response):
    """A layout that the names and shapes of a layer fit."""

    layout: str
    summary: str
    width: Annotated[PositiveCount, doc("M, of the embeddings.")]
    rotary_order: Annotated[
        RotaryOrder | None,
        doc("Of the layout's models; null if they have no rotary embedding."),
    ]
    alibi: Annotated[bool | Literal["scaled"], doc("Of the layout's models.")]
    heads: Annotated[
        Sequence[HeadCounts],
        doc("Numbers of heads that the shapes allow, the likeliest first. `width` is of a head."),
    ]


class FoundLayer(Response):
    """An attention layer of a model."""

    prefix: Annotated[str, doc("Of the names of the layer's tensors, for `prefix`.")]
    layouts: Annotated[
        Sequence[FittingLayout],
        Field(
            min_length=1,
            description="The layouts that names and shapes fit; several if they are ambiguous.",
        ),
    ]
    shapes: Annotated[
        Mapping[str, Sequence[Count]],
        doc("Of the layer's tensors, by name without the prefix."),
    ]


class LayersResponse(Response):
    """The attention layers of a model."""

    layers: Sequence[FoundLayer]
    max_body_bytes: Annotated[Count, doc("The largest body of a run that this service accepts.")]


class LayerProof(Response):
    """The proof of a description, which `qkv describe` compared with the real module."""

    error: Annotated[NonNegative, doc("The largest one, relative to the largest output.")]
    length: Annotated[PositiveCount, doc("Tokens for which the description holds.")]
    versions: Annotated[Mapping[str, str], doc("Of the packages that ran the model.")]


class LoadedLayer(Response):
    """A layer that requests may name."""

    name: Annotated[str, doc("The name in requests.")]
    layout: str
    prefix: Annotated[str, doc("Of the names of its tensors.")]
    dtype: FloatingDtype
    heads: Annotated[PositiveCount, doc("The number of query heads.")]
    kv_heads: Annotated[PositiveCount, doc("The number of key heads.")]
    head_width: Annotated[PositiveCount, doc("The width D of a query head.")]
    width: Annotated[PositiveCount, doc("The width M of x.")]
    output_width: Annotated[
        PositiveCount | None,
        doc("Of the output; null: the layer has no output projection."),
    ]
    rope: Annotated[Mapping[str, Any] | None, doc("A rotary embedding of queries and keys.")]
    qk_norm: Annotated[
        Mapping[str, Any] | None,
        doc("Numbers of the norm of queries and keys; null: there is none."),
    ]
    alibi: Annotated[bool | Literal["scaled"], doc("As in a layer of a request.")]
    parameters: Annotated[
        Mapping[str, Any],
        doc(
            "Parameters of a variant that the checkpoint has. A run has them unless the request "
            "gives others."
        ),
    ]
    inputs: Annotated[Sequence[_LayerInput], doc("The values of `layer.input`.")]
    ignored: Annotated[
        Sequence[str], doc("Fields of config.json that `ignore` in qkv.toml passes over.")
    ]
    proof: Annotated[
        LayerProof | None,
        doc("null: the layer is as config.json or lines by hand describe it, which nobody proved."),
    ]
    max_length: Annotated[
        PositiveCount | None, doc("The most tokens of a request; null: any number.")
    ]
    bytes: Annotated[Count, doc("Of its weights.")]


class UnservedLayers(Response):
    """Layers of a checkpoint that are not served, beside others that are."""

    path: str
    problem: str


class LoadedCheckpoint(Response):
    """A checkpoint of the service's settings."""

    name: str
    layers: Annotated[Count, doc("The number of its layers.")]
    bytes: Annotated[Count, doc("Of the weights of its layers.")]
    problem: Annotated[str | None, doc("The reason why it is not served; null if it is.")]
    unserved: Annotated[
        Sequence[UnservedLayers],
        doc(
            "The reasons why some of its layers are not served, by the path of the modules around "
            "their blocks."
        ),
    ]


class LoadedLayers(Response):
    """The layers that requests may name, and the checkpoints that they are of."""

    layers: Sequence[LoadedLayer]
    checkpoints: Sequence[LoadedCheckpoint]


class DetectedLayer(Response):
    """A way to run a layer, and how well it fits the output of the real module."""

    layout: str
    heads: Count
    kv_heads: Count
    rotary: Annotated[RotaryOrder | None, doc("The order of rotary channels; null: not rotary.")]
    scale: Annotated[float, Field(gt=0)]
    causal: bool
    rope: Annotated[Mapping[str, Any] | None, doc("The rotary embedding; null: there is none.")]
    alibi: Annotated[bool | Literal["scaled"], doc("As in a layer of a request.")]
    qk_norm: Annotated[Mapping[str, Any] | None, doc("QK-norm; null: the layer has none.")]
    error: Annotated[
        NonNegative, doc("Largest absolute difference to `y`, divided by its largest size.")
    ]


class ConversionCheck(Response):
    """The difference of both layers' outputs on the same random input, in float64."""

    largest_absolute_difference: Number
    largest_absolute_output: Number
    elements: Count
    dtype: Literal["float64"]
