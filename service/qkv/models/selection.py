"""Selects layers by their names, and heads or sequences by their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import index

from qkv.errors import InvalidContent

__all__ = ["is_selected", "to_numbers"]


def is_selected(layer: str, pattern: str) -> bool:
    """True if a pattern names a layer or a module around it.

    Args:
        layer: qualified name of a module, such as "encoder.layer.3.attention.self".
        pattern: such as "encoder.layer.3" or "encoder.layer.*.attention"; "*" stands for any
            characters.
    """
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")


def to_numbers(name: str, values: Iterable[int]) -> list[int]:
    """Returns integers as a list.

    Raises:
        InvalidContent: they are no integers.
    """
    try:
        numbers = list(values)
        if not any(isinstance(n, bool) for n in numbers):
            return [index(n) for n in numbers]
    except TypeError:
        pass  # no list, or no integers
    raise InvalidContent(f"{name} is invalid: got {values!r:.80}, expected a list of integers")
