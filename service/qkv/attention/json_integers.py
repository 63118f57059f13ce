"""Integers in JSON that are written as floats, such as 3.0: JSON Schema calls them integers.

The catalogue converts integer parameters with it, `jobs.fields` integer fields.
"""

from __future__ import annotations

import typing
from typing import Any


def to_integer(value: Any) -> Any:
    """Converts 1.0 to 1, in lists too; returns other values unchanged, and those past 64 bits."""
    if isinstance(value, list):
        return [to_integer(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**64
    return int(value) if is_whole else value


def takes_integers(annotation: Any) -> bool:
    """True if an annotation has `int` at any depth, and `float` nowhere."""
    types = _types(annotation)
    return int in types and float not in types


def _types(annotation: Any) -> set[type]:
    if isinstance(annotation, type):
        return {annotation}
    return set().union(*map(_types, typing.get_args(annotation)))
