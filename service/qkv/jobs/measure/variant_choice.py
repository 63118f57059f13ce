"""A variant and its parameters, as a body names them."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import pydantic

from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.errors import InvalidContent, QkvError, pointer_to, shown
from qkv.jobs.fields import invalid_field

__all__ = ["MOST", "Choice"]

MOST = 16
"""Variants that one request may name."""


class _Named(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variant: str
    parameters: dict[str, Any] = {}


class Choice(NamedTuple):
    """A variant with parameters that it takes.

    Attributes:
        parameters: as they came.
        pointer: JSON pointer to where it is named.
        is_object: it is named as an object, so that there are parts to point to.
    """

    variant: Variant
    parameters: dict[str, Any]
    pointer: str
    is_object: bool

    @classmethod
    def of(cls, said: Any, *within: str | int) -> Choice:
        """Finds what a part of a body names: a variant's name, or an object of `variant` and
        `parameters`.

        Args:
            said: that part.
            within: where in the body it stands.

        Raises:
            NotFound: no such variant.
            InvalidContent: it is neither, or a parameter is wrong.
        """
        pointer = pointer_to(*within)
        if isinstance(said, str):
            name, parameters = said, {}
        elif isinstance(said, dict):
            try:
                named = _Named.model_validate(said)
            except pydantic.ValidationError as error:
                raise invalid_field(error, list(_Named.model_fields), *map(str, within)) from None
            name, parameters = named.variant, named.parameters
        else:
            raise InvalidContent(
                f"{'.'.join(map(str, within))} came as {shown(said)}; it must be a variant's name, "
                'or {"variant": ..., "parameters": {...}}',
                pointer=pointer,
            )
        try:
            variant = catalogue.find(name)
        except QkvError as error:
            error.pointer = pointer + "/variant" * isinstance(said, dict)
            raise
        choice = cls(variant, parameters, pointer, isinstance(said, dict))
        try:
            variant.parse(parameters)
        except QkvError as error:
            choice.blame(error)
        return choice

    def blame(self, error: QkvError) -> NoReturn:
        """Raises an error that a job of this variant found, with a pointer into the body that named
        it: what is wrong with a parameter is wrong here."""
        if error.pointer is not None and error.pointer.startswith("/parameters"):
            error.pointer = self.pointer + (error.pointer if self.is_object else "")
        raise error
