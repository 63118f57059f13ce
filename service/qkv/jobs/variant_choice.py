"""A variant with its parameters, as an item of a compare or sweep request."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import pydantic

from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
from qkv.jobs.fields import field_error

MAX_VARIANTS = 16
"""The largest number of variants in one request."""


class _ChoiceFields(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variant: str
    parameters: dict[str, Any] = {}


class VariantChoice(NamedTuple):
    """A variant with validated parameters.

    Attributes:
        parameters: the parameters as sent in the request.
        pointer: JSON pointer to the choice in the body.
        is_object: the choice is an object, so that a pointer can name a part of it.
    """

    variant: Variant
    parameters: dict[str, Any]
    pointer: str
    is_object: bool

    @classmethod
    def parse(cls, value: Any, *within: str | int) -> VariantChoice:
        """Parses a variant's name, or an object with `variant` and `parameters`.

        Args:
            value: a part of the body.
            within: the path of that part in the body.

        Raises:
            NotFound: the variant does not exist.
            InvalidContent: the value is neither, or a parameter is invalid.
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
                f"{'.'.join(map(str, within))} is invalid: got {format_value(value)}, expected a "
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
        """Raises an error of this variant's job with a pointer to its place in the body."""
        if error.pointer is not None and error.pointer.startswith("/parameters"):
            error.pointer = self.pointer + (error.pointer if self.is_object else "")
        raise error
