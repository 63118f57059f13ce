"""The base class of responses, and the types of their fields.

The service encodes a response with `wire.json.dump`, the client parses it with `msgspec.convert`,
and the OpenAPI document takes its schema from it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

__all__ = ["Count", "NonNegative", "PositiveCount", "Response", "doc"]

Count: TypeAlias = Annotated[int, Meta(ge=0)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]


class Response(Struct, frozen=True, omit_defaults=True):
    """A response, or an object in one.

    A field whose default is None is left out of the JSON while it is None, and may be missing in
    the JSON of an older service. Fields that a newer service adds are ignored.
    """


def doc(description: str) -> Meta:
    return Meta(description=description)
