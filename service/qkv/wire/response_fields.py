"""Fields of the response dataclasses: their JSON schema keywords, and the dataclasses as JSON.

The service encodes with `json_fields`, the client parses with `from_json`. A field whose default is
None may be missing in the JSON of an older service. It is left out while it is None, unless its
metadata have `IS_KEPT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

__all__ = [
    "IS_KEPT",
    "JSON_NAME",
    "Count",
    "Keywords",
    "NonNegative",
    "PositiveCount",
    "doc",
    "from_json",
    "is_left_out",
    "json_fields",
    "json_name",
]

_T = TypeVar("_T")
JSON_NAME: Final = "json_name"
"""Key of a field's metadata: its name in JSON, if it differs from the attribute."""
IS_KEPT: Final = "is_kept"
"""Key of a field's metadata: true if the field is null in JSON while it is None."""


class Keywords:
    """Keywords that a field adds to its JSON schema; pydantic calls the hook by its name."""

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return handler(core_schema) | self._keywords


def doc(description: str) -> Keywords:
    return Keywords(description=description)


Count: TypeAlias = Annotated[int, Keywords(minimum=0)]
PositiveCount: TypeAlias = Annotated[int, Keywords(minimum=1)]
NonNegative: TypeAlias = Annotated[float, Keywords(minimum=0)]


class _JsonField(NamedTuple):
    """A field of a dataclass in JSON.

    Attributes:
        name: the attribute.
        key: its name in JSON.
        left_out: it is left out while it is None.
        may_be_missing: it has a default.
        parse: parses its JSON value.
    """

    name: str
    key: str
    left_out: bool
    may_be_missing: bool
    parse: Callable[[Any], Any]


def json_fields(response: Any) -> dict[str, Any]:
    """Returns the fields of a response by their JSON names, without those that are left out.

    Raises:
        TypeError: it is not one of these dataclasses.
    """
    kind: Any = type(response)
    keys, optional, read = _json_keys(kind)
    values = dict(zip(keys, read(response), strict=True))
    for key in optional:
        if values[key] is None:
            del values[key]
    return values


def from_json(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Returns a dataclass with values from JSON. Ignores unknown fields, as of a newer service.

    Raises:
        KeyError, TypeError: a field is missing, or an object is not an object.
    """
    hashable: Any = kind  # for mypy
    return kind(
        **{
            f.name: f.parse(values[f.key])
            for f in _json_fields(hashable)
            if f.key in values or not f.may_be_missing
        }
    )


def json_name(attribute: Field[Any]) -> str:
    """Returns the name of a field in JSON."""
    return str(attribute.metadata.get(JSON_NAME, attribute.name))


def is_left_out(attribute: Field[Any]) -> bool:
    """Returns True if a field is left out of the JSON while it is None."""
    return attribute.default is None and not attribute.metadata.get(IS_KEPT, False)


@cache
def _json_fields(kind: Any) -> tuple[_JsonField, ...]:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a response")
    hints = get_type_hints(kind)
    return tuple(
        _JsonField(f.name, json_name(f), is_left_out(f), f.default is None, _parser(hints[f.name]))
        for f in fields(kind)
    )


@cache
def _json_keys(
    kind: Any,
) -> tuple[Sequence[str], Sequence[str], Callable[[Any], Iterable[Any]]]:
    """Returns the names in JSON, those of them that may be left out, and a reader of the values."""
    fields = _json_fields(kind)
    keys, optional = [f.key for f in fields], [f.key for f in fields if f.left_out]
    if len(fields) > 1:
        return keys, optional, attrgetter(*[f.name for f in fields])
    name = fields[0].name  # attrgetter would return the value itself
    return keys, optional, lambda response: (getattr(response, name),)


def _parser(hint: Any) -> Callable[[Any], Any]:
    """Returns the function that parses a JSON value into a field of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if type(None) in arguments:
        parse = _parser(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else parse(value)
    if origin is tuple:
        parse = _parser(arguments[0])
        return lambda value: tuple(map(parse, value))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: from_json(hint, value)
    return lambda value: value
