"""A validated convert request: converts weights of one layout to another."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from qkv.attention.layers.conversion import convert
from qkv.jobs.fields import field_error
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message

__all__ = ["ConvertFields", "convert_message"]


class ConvertFields(pydantic.BaseModel):
    """The fields of a convert request, without its tensors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    source: Annotated[
        str, pydantic.Field(alias="from", description="The layout of the tensors in the request.")
    ]
    target: Annotated[
        str, pydantic.Field(alias="to", description="The layout of the tensors in the response.")
    ]
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=65536)] | None,
        pydantic.Field(description="The number of query heads, for the check. By default one."),
    ] = None
    bias: Annotated[
        Literal["refuse", "augment"],
        pydantic.Field(
            description='v1 has no biases. "augment" turns each bias into one more row of its '
            'weight on the way to v1, and that row into a bias on the way to v2. "refuse" '
            "rejects biases."
        ),
    ] = "refuse"
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="The dtype of tensors that are sent as lists of numbers."),
    ] = "float32"


def convert_message(message: Message) -> Message:
    """Converts the weights in a message with the fields of POST /v1/convert.

    Raises:
        InvalidContent: a field or tensor is wrong, or the target layout cannot hold a tensor.
    """
    try:
        fields = ConvertFields.model_validate(message.fields)
    except pydantic.ValidationError as error:
        known = ["from", "to", "tensors", "heads", "bias", "dtype", "encoding"]
        raise field_error(error, known) from None
    tensors = {
        name: cast_untyped(raw, name, FLOATING, fields.dtype, f"/tensors/{name}").numpy()
        for name, raw in message.tensors.items()
    }
    converted = convert(fields.source, fields.target, tensors, heads=fields.heads, bias=fields.bias)
    response = {
        "from": fields.source,
        "to": fields.target,
        "tensors": None,
        "check": converted.check,
    }
    raw = {name: RawTensor.from_numpy(array) for name, array in converted.tensors.items()}
    return Message(response, raw, encoding=message.encoding or "base64")
