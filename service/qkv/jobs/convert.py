"""A conversion as a message: weights of one layout in, of another and a check out."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from qkv.attention.layers.conversion import convert
from qkv.jobs.fields import invalid_field
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import typed
from qkv.wire.message import Message

__all__ = ["Conversion", "convert_message"]


class Conversion(pydantic.BaseModel):
    """The fields of a conversion, tensors apart."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    source: Annotated[
        str, pydantic.Field(alias="from", description="The layout the tensors are in.")
    ]
    target: Annotated[str, pydantic.Field(alias="to", description="The layout wanted.")]
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=65536)] | None,
        pydantic.Field(description="Query heads, for the check; null: one."),
    ] = None
    bias: Annotated[
        Literal["refuse", "augment"],
        pydantic.Field(
            description='"augment" keeps a bias, which v1 has no place for, as one more row of '
            "the weight, and takes it out again on the way to v2."
        ),
    ] = "refuse"
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="What numbers in lists become."),
    ] = "float32"


def convert_message(message: Message) -> Message:
    """Converts what a message holds; its fields are those of POST /v1/convert.

    Raises:
        InvalidContent: a field or tensor is wrong, or the target has no place for something.
    """
    try:
        asked = Conversion.model_validate(message.fields)
    except pydantic.ValidationError as error:
        known = ["from", "to", "tensors", "heads", "bias", "dtype", "encoding"]
        raise invalid_field(error, known) from None
    tensors = {
        name: typed(raw, name, FLOATING, asked.dtype, f"/tensors/{name}").numpy()
        for name, raw in message.tensors.items()
    }
    done = convert(asked.source, asked.target, tensors, heads=asked.heads, bias=asked.bias)
    fields = {"from": asked.source, "to": asked.target, "tensors": None, "check": done.check}
    raw = {name: RawTensor.from_numpy(array) for name, array in done.tensors.items()}
    return Message(fields, raw, encoding=message.encoding or "base64")
