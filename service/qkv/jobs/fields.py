"""The fields of a request that are not tensors, and the error for an invalid field."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from qkv.attention.json_integers import to_integer
from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


INTEGER: Final = pydantic.BeforeValidator(to_integer)
"""Annotates an integer field. It stands after the field's bounds, which its schema would lose
otherwise."""


def _check_layer(value: Any) -> Any:
    """Rejects a layer that is not an object, such as a name."""
    if value is not None and not isinstance(value, dict):
        raise PydanticCustomError(
            "layer_type", "expected an object with a name, or with layout, heads and tensors"
        )
    return value


LayerField = Annotated[
    dict[str, Any] | None,
    pydantic.Field(
        description="A layer that projects embeddings to query, key and value. By default none."
    ),
    pydantic.BeforeValidator(_check_layer),
]
"""The field `layer` of a request, without the tensors in it."""


class JobFields(pydantic.BaseModel):
    """The fields that runs and gradients share."""

    model_config = _CONFIG

    parameters: dict[str, Any] = {}
    dtype: Annotated[
        FloatingDtype,
        pydantic.Field(description="The dtype of tensors that are sent as lists of numbers."),
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
    error: pydantic.ValidationError,
    known: Sequence[str],
    *within: str,
    nested: Collection[str] = (),
    branches: Collection[str] = (),
) -> InvalidContent:
    """Describes the first error of an object's fields in one sentence.

    Args:
        error: the result of validating an object of the body.
        known: the field names that the object may have.
        within: the path of the object in the body.
        nested: the field names of objects in the object.
        branches: the names of the forms that the object may have.
    """
    fault = error.errors(include_url=False, include_context=False)[0]
    if fault["loc"] and fault["loc"][0] in branches:
        fault["loc"] = fault["loc"][1:]
    # pydantic puts the branches of a union into `loc` too, as words that are no field names
    path = [p for i, p in enumerate(fault["loc"]) if i == 0 or isinstance(p, int) or p in nested]
    if fault["type"] in ("extra_forbidden", "missing"):  # the field's own name is last
        name = fault["loc"][-1]
        parents = [*within, *(path[:-1] if path[-1] == name else path)]
        pointer, place = pointer_to(*parents, name), ".".join(map(str, parents))
        if fault["type"] == "missing":
            return InvalidContent(f"{place}{'.' * bool(place)}{name} is missing", pointer=pointer)
        listing = f"; known are {', '.join(known)}" if len(fault["loc"]) == 1 else ""
        of = f" of {place}" if place else ""
        return InvalidContent(f"unknown field {name!r}{of}{listing}", pointer=pointer)
    pointer, where = pointer_to(*within, *path), ".".join(map(str, (*within, *path)))
    detail = f"{where} is invalid: got {format_value(fault['input'])}, {_expectation(fault['msg'])}"
    return InvalidContent(detail, pointer=pointer)


def _expectation(message: str) -> str:
    """Returns a message of pydantic as "expected ..." where it has pydantic's usual form.

    It writes small bounds with all their zeros.
    """
    message = re.sub(r"\b0\.0000\d+", lambda bound: f"{float(bound[0]):g}", message)
    for prefix in ("Input should be ", "Value should be "):
        if message.startswith(prefix):
            return f"expected {message.removeprefix(prefix)}"
    return message
