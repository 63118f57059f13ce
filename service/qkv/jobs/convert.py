"""A validated convert request: converts weights of one layout to another, or detects the layout.

With `check`, the candidates run on its hidden states before the best is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import pydantic

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.conversion import convert
from qkv.attention.layers.detection import MAX_TOKENS, detect
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import MAX_HEADS, NESTED_FIELDS, LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope
from qkv.errors import InvalidContent
from qkv.jobs.detection_check import check_bytes, read_check, refuse_doubtful
from qkv.jobs.fields import field_error
from qkv.jobs.layer_inputs import arrays_of
from qkv.tensors import RawTensor
from qkv.wire.layer_responses import RotaryOrder
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype


class ConvertFields(pydantic.BaseModel):
    """The fields of a convert request, without its tensors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    source: Annotated[
        str, pydantic.Field(alias="from", description="The layout of the tensors in the request.")
    ]
    target: Annotated[
        str | None,
        pydantic.Field(
            alias="to",
            description="The layout of the tensors in the response. Needed without `check`.",
        ),
    ] = None
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=MAX_HEADS)] | None,
        pydantic.Field(
            description="The number of query heads. Needed by layouts that keep the tensors of a "
            "head together, by grouped key heads, and to move rotary channels."
        ),
    ] = None
    kv_heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=MAX_HEADS)] | None,
        pydantic.Field(description="The number of key heads, as in a layer."),
    ] = None
    prefix: Annotated[str | None, pydantic.Field(max_length=1024, description="As in a layer.")] = (
        None
    )
    rope: Annotated[
        Rope | None,
        pydantic.Field(
            description="The rotary embedding of the source. Only `order` and `dims` change the "
            "tensors."
        ),
    ] = None
    to_order: Annotated[
        RotaryOrder | None,
        pydantic.Field(
            description="The rotary order of the response. By default that of the target layout, "
            "else that of the source."
        ),
    ] = None
    grouped: Annotated[
        Literal["refuse", "repeat"],
        pydantic.Field(
            description='If the target has as many key heads as query heads: "repeat" repeats '
            'each key and value head for its query heads, exactly. "refuse" rejects grouped heads.'
        ),
    ] = "refuse"
    bias: Annotated[
        Literal["refuse", "augment"],
        pydantic.Field(
            description='v1 has no biases. "augment" turns each bias into one more row of its '
            'weight on the way to v1, and that row into a bias on the way to v2. "refuse" '
            "rejects biases."
        ),
    ] = "refuse"
    check: Annotated[
        dict[str, Any] | None,
        pydantic.Field(
            description="Hidden states `x` (L, M) or (B, L, M), and the output `y` of the real "
            f"module. At most {MAX_TOKENS} hidden states. Layouts, rotary orders, numbers of heads "
            "and scales that the other fields leave open are tried on them."
        ),
    ] = None
    scale: Annotated[
        Annotated[float, pydantic.Field(gt=0, le=1e6)] | None,
        pydantic.Field(description="With `check`: one more factor of the scores to try."),
    ] = None
    dtype: Annotated[
        FloatingDtype,
        pydantic.Field(description="The dtype of tensors that are sent as lists of numbers."),
    ] = "float32"


def convert_message(
    message: Message,
    raise_if_stopped: Callable[[], object] = lambda: None,
    fields: ConvertFields | None = None,
) -> Message:
    """Converts the weights in a message with the fields of POST /v1/convert.

    Args:
        message: the request.
        raise_if_stopped: called between pieces of the work; it raises to end the conversion.
        fields: of the message, validated; None validates them.

    Raises:
        InvalidContent: a field or tensor is wrong, or the target layout cannot hold a tensor.
    """
    try:
        fields = fields or ConvertFields.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise field_error(error, known_fields(), nested=NESTED_FIELDS) from None
    if fields.target is not None:
        layout_catalogue.find(fields.target, "/to")
    tensors = arrays_of(message.tensors, fields.dtype, "tensors")
    raise_if_stopped()
    if fields.check is None:
        if fields.scale is not None:
            raise InvalidContent("scale needs check, whose outputs it changes", pointer="/scale")
        if fields.target is None:
            sent = "invalid: got null" if "target" in fields.model_fields_set else "missing"
            raise InvalidContent(f"to is {sent}, expected a layout, or check", pointer="/to")
        return _converted(_read_layer(fields, tensors), fields, message, raise_if_stopped)
    check = read_check(fields.check or {}, arrays_of(message.check, fields.dtype, "check"))
    detection = detect(tensors, check, _options(fields), fields.scale, raise_if_stopped)
    listed = {"detected": [candidate.as_json() for candidate in detection.candidates]}
    best = detection.candidates[0]
    if fields.target is None:
        known = {
            "from": best.split.layout,
            "prefix": detection.prefix.rstrip("."),
            "ignored": list(detection.ignored),
        }
        return Message(known | listed, encoding=message.encoding)
    recognized = {
        "source": best.split.layout,
        "heads": best.split.heads,
        "kv_heads": best.split.kv_heads,
        "prefix": detection.prefix,
        "rope": best.variation.rope,
    }
    fields = fields.model_copy(update=recognized)
    layer = _read_layer(fields, tensors)
    positions = {"alibi": best.variation.alibi, "qk_norm": best.variation.norm or QKNorm()}
    layer = replace(layer, options=layer.options.model_copy(update=positions))
    refuse_doubtful(detection, [*layer.tensors.values(), *check])
    return _converted(layer, fields, message, raise_if_stopped, listed)


def working_bytes(message: Message) -> int:
    """Returns the bytes that a conversion needs beside its request."""
    size = sum(tensor.nbytes for tensor in message.tensors.values())
    numbers = sum(math.prod(tensor.shape) for tensor in message.tensors.values())
    # the converted tensors, and the numbers of both layers in float64, for the check
    working = 2 * size + 16 * numbers
    return (
        working + check_bytes(message.check, numbers, message.fields) if message.check else working
    )


def _converted(
    layer: Layer,
    fields: ConvertFields,
    message: Message,
    raise_if_stopped: Callable[[], object],
    listed: Mapping[str, Any] | None = None,
) -> Message:
    """Returns the response with the tensors of the target layout."""
    assert fields.target is not None
    converted = convert(
        layer,
        fields.target,
        bias=fields.bias,
        grouped=fields.grouped,
        to_order=fields.to_order,
        raise_if_stopped=raise_if_stopped,
    )
    response = {
        "from": layer.layout.name,
        "to": fields.target,
        "prefix": (layer.options.prefix or "").rstrip("."),
        "ignored": list(layer.ignored),
        **(listed or {}),
        "rotary_order": converted.rotary_order,
        "layer": converted.options.model_dump(exclude_defaults=True),
        "tensors": None,
        "check": converted.check,
    }
    raw = {name: RawTensor.from_numpy(array) for name, array in converted.tensors.items()}
    return Message(response, raw, encoding=message.encoding or "base64")


def known_fields() -> list[str]:
    """Returns the names of the fields in the order of the schema, as a client writes them."""
    names = [field.alias or name for name, field in ConvertFields.model_fields.items()]
    return [*names[:2], "tensors", *names[2:], "encoding"]


def _read_layer(fields: ConvertFields, tensors: Mapping[str, Array]) -> Layer:
    """Returns the layer in the source layout.

    Raises:
        InvalidContent: a tensor is wrong, or the layout is not clear.
    """
    try:
        return read_layer(_options(fields), tensors, "")
    except InvalidContent as error:
        if error.pointer == "/layout":
            error.pointer = "/from"
        raise


def _options(fields: ConvertFields) -> LayerOptions:
    return LayerOptions(
        layout=fields.source,
        heads=fields.heads,
        kv_heads=fields.kv_heads,
        prefix=fields.prefix,
        rope=fields.rope,
    )
