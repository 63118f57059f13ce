"""The base class of responses, and the types of their fields.

The service builds a response, FastAPI documents it, and the client reads it with `parse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

import pydantic

Count: TypeAlias = Annotated[int, pydantic.Field(ge=0)]
PositiveCount: TypeAlias = Annotated[int, pydantic.Field(ge=1)]
NonNegative: TypeAlias = Annotated[float, pydantic.Field(ge=0)]


class Response(pydantic.BaseModel):
    """A response, or an object in one. Fields that a newer service adds are ignored."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        serialize_by_alias=True,
        validate_by_name=True,
        json_schema_extra={"additionalProperties": False},
    )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Builds it from the service's JSON.

        Raises:
            pydantic.ValidationError: a field is missing, or has another type.
        """
        return cls.model_validate(fields)

    def to_json(self) -> bytes:
        """Returns its JSON."""
        return self.model_dump_json().encode()


def doc(description: str) -> Any:
    """Returns the annotation of a field's description."""
    return pydantic.Field(description=description)


def omitted(description: str | None = None) -> Any:
    """Returns the default of a field that is left out of the JSON while it is None.

    It may be missing in the JSON of an older service. Its type is `... | SkipJsonSchema[None]`.
    """
    return pydantic.Field(default=None, exclude_if=_is_none, description=description)


def _is_none(value: object) -> bool:
    return value is None
