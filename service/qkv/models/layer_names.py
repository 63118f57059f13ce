"""Selects layers by their names."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["is_selected"]


def is_selected(layer: str, pattern: str) -> bool:
    """True if a pattern names a layer or a module around it.

    Args:
        layer: qualified name of a module, such as "encoder.layer.3.attention.self".
        pattern: such as "encoder.layer.3" or "encoder.layer.*.attention"; "*" stands for any
            characters.
    """
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")
