"""A variant with its parameters, as compare and sweep requests name it."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import pydantic

from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
from qkv.jobs.fields import field_error

__all__ = ["MAX_VARIANTS", "VariantChoice"]

MAX_VARIANTS = 16
"""The number of variants that one request may name."""


class _ChoiceFields(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variant: str
    parameters: dict[str, Any] = {}


class VariantChoice(NamedTuple):
    """A variant with validated parameters.

    Attributes:
        parameters: the parameters in the request.
        pointer: JSON pointer to the choice in the body.
        is_object: the choice is an object, so that pointers may go into it.
    """

    variant: Variant
    parameters: dict[str, Any]
    pointer: str
    is_object: bool

    @classmethod
    def parse(cls, value: Any, *within: str | int) -> VariantChoice:
        """Parses a variant's name, or an object of `variant` and `parameters`.

        Args:
            value: a part of the body.
            within: the path of that part.

        Raises:
            NotFound: the variant does not exist.
            InvalidContent: the value is neither, or a parameter is wrong.
        """
        pointer = pointer_to(*within)
        if isinstance(value, str):
            name, parameters = value, {}
        elif isinstance(value, dict):
            try:
                fields = _ChoiceFields.model_validate(value)
            except pydantic.ValidationError as error:
                raise field_error(
                    error, list(_ChoiceFields.model_fields), *map(str, within)
                ) from None
            name, parameters = fields.variant, fields.parameters
        else:
            raise InvalidContent(
                f"{'.'.join(map(str, within))} came as {format_value(value)}; it must be a "
                'variant\'s name, or {"variant": ..., "parameters": {...}}',
                pointer=pointer,
            )
        try:
            variant = catalogue.find(name)
        except QkvError as error:
            error.pointer = pointer + "/variant" * isinstance(value, dict)
            raise
        choice = cls(variant, parameters, pointer, isinstance(value, dict))
        try:
            variant.parse(parameters)
        except QkvError as error:
            choice.reraise(error)
        return choice

    def reraise(self, error: QkvError) -> NoReturn:
        """Raises an error of this variant's job with a pointer into the body that named it."""
        if error.pointer is not None and error.pointer.startswith("/parameters"):
            error.pointer = self.pointer + (error.pointer if self.is_object else "")
        raise error
