"""The fields of a body, tensors apart, and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic

from qkv.errors import InvalidContent, pointer_to, shown
from qkv.wire.message import Message

__all__ = ["WHOLE", "Fields", "InlineLayer", "fields_of", "invalid_field"]

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


def _whole(value: Any) -> Any:
    """1.0 is an integer to JSON Schema, and to whatever writes all numbers alike."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = pydantic.BeforeValidator(_whole)
"""Of a whole number of JSON; behind its bounds, or its schema has none."""


class InlineLayer(pydantic.BaseModel):
    """A layer that stands in the request, beside its tensors."""

    model_config = _CONFIG

    layout: Annotated[str, pydantic.Field(description="Weight layout: v1 or v2.")]
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=65536)] | None,
        pydantic.Field(description="Query heads; null: one, and no head axis in the answer."),
    ] = None


class Fields(pydantic.BaseModel):
    """What stands beside the inputs, whatever is done with them."""

    model_config = _CONFIG

    parameters: dict[str, Any] = {}
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="What numbers in lists become."),
    ] = "float32"
    layer: Annotated[
        str | dict[str, Any] | None,
        pydantic.Field(description="A layer that projects the inputs."),
    ] = None


_Fields = TypeVar("_Fields", bound=Fields)


def fields_of(message: Message, model: type[_Fields]) -> _Fields:
    """The message's fields.

    Raises:
        InvalidContent: one is unknown, mistyped or out of bounds.
    """
    try:
        return model.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise invalid_field(error, ["inputs", *model.model_fields, "encoding"]) from None


def invalid_field(
    error: pydantic.ValidationError, known: Sequence[str], *within: str
) -> InvalidContent:
    """The first fault of a body's fields, in a sentence.

    Args:
        error: from validating an object of the body.
        known: the names the object may have.
        within: where in the body the object stands.
    """
    fault = error.errors(include_url=False, include_context=False)[0]
    # a union's branches are in loc too, as words no field has
    path = [p for i, p in enumerate(fault["loc"]) if i == 0 or isinstance(p, int)]
    if fault["type"] in ("extra_forbidden", "missing"):  # the field itself comes last
        name = fault["loc"][-1]
        parents = [*within, *path[: len(fault["loc"]) - 1]]
        pointer, place = pointer_to(*parents, name), ".".join(map(str, parents))
        if fault["type"] == "missing":
            return InvalidContent(f"{place}{'.' * bool(place)}{name} is missing", pointer=pointer)
        listing = f"; known are {', '.join(known)}" if len(fault["loc"]) == 1 else ""
        of = f" of {place}" if place else ""
        return InvalidContent(f"unknown field {name!r}{of}{listing}", pointer=pointer)
    pointer, where = pointer_to(*within, *path), ".".join(map(str, (*within, *path)))
    detail = f"{where} came as {shown(fault['input'])}: {fault['msg']}"
    return InvalidContent(detail, pointer=pointer)
