"""Numbers of a configuration, within the bounds that any model keeps."""

from __future__ import annotations

from typing import Final

from qkv.errors import InvalidContent, format_value
from qkv.jobs.loaded.known_models import Config

_LARGEST: Final = 1e30
_LARGEST_INTEGER: Final = 1e9


def number(
    config: Config, *names: str, least: float = -_LARGEST, most: float = _LARGEST
) -> float | None:
    """Returns the first of these fields that is a number.

    Raises:
        InvalidContent: it is out of range.
    """
    for name in names:
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not least <= value <= most:
            raise InvalidContent(
                f"config.json: {name} is invalid: got {format_value(value)}, expected a number "
                f"from {least:g} to {most:g}"
            )
        return value
    return None


def integer(config: Config, *names: str) -> int | None:
    """Returns the first of these fields that is a number, which must be an integer.

    Raises:
        InvalidContent: it is none, or out of range.
    """
    value = number(config, *names, least=0, most=_LARGEST_INTEGER)
    if value is not None and value != int(value):
        raise InvalidContent(
            f"config.json: {' or '.join(names)} is invalid: got {value}, expected an integer"
        )
    return None if value is None else int(value)
