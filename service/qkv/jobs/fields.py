"""The fields of a request that are not tensors, and the error for a field that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.wire.message import Message

__all__ = ["INTEGER", "JobFields", "LayerField", "LayerFields", "field_error", "parse_fields"]

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


def _to_integer(value: Any) -> Any:
    """Converts 1.0 to 1: to JSON Schema both are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER: Final = pydantic.BeforeValidator(_to_integer)
"""Annotates an integer field. It follows the field's bounds, which its schema would lose otherwise.
"""


def _check_layer(value: Any) -> Any:
    """Refuses a layer that is no object, such as a name."""
    if value is not None and not isinstance(value, dict):
        raise PydanticCustomError("layer_type", "it must be an object of layout, heads and tensors")
    return value


LayerField = Annotated[
    dict[str, Any] | None,
    pydantic.Field(description="A layer that projects the inputs."),
    pydantic.BeforeValidator(_check_layer),
]
"""The field `layer` of a request, without the tensors in it."""


class LayerFields(pydantic.BaseModel):
    """The fields of a layer in a request, without its tensors."""

    model_config = _CONFIG

    layout: Annotated[str, pydantic.Field(description="Weight layout: v1 or v2.")]
    heads: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=65536)] | None,
        pydantic.Field(description="Query heads; null: one, and no head axis in the answer."),
    ] = None


class JobFields(pydantic.BaseModel):
    """The fields that runs and gradients share."""

    model_config = _CONFIG

    parameters: dict[str, Any] = {}
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="What numbers in lists become."),
    ] = "float32"
    layer: LayerField = None


_Fields = TypeVar("_Fields", bound=JobFields)


def parse_fields(message: Message, model: type[_Fields]) -> _Fields:
    """Validates the fields of a message.

    Raises:
        InvalidContent: a field is unknown, mistyped or out of bounds.
    """
    try:
        return model.model_validate(message.fields)
    except pydantic.ValidationError as error:
        raise field_error(error, ["inputs", *model.model_fields, "encoding"]) from None


def field_error(
    error: pydantic.ValidationError, known: Sequence[str], *within: str
) -> InvalidContent:
    """Returns the first error of an object's fields as one sentence.

    Args:
        error: from validating an object of the body.
        known: the names that the object may have.
        within: the path of the object in the body.
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
    detail = f"{where} came as {format_value(fault['input'])}: {fault['msg']}"
    return InvalidContent(detail, pointer=pointer)
