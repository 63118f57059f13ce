"""Writes a description as qkv.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.models.describe.described_model import Described


def toml_of(described: Described) -> str:
    """Returns the text of qkv.toml: a table for each kind of layer."""
    texts = [
        "# Written by `qkv describe`. A changed line loses its mark: it is not proven any more.\n"
    ]
    for number, kind in enumerate(described.kinds, 1):
        lines = (f"{name} = {_value(value)}\n" for name, value in kind.table.items())
        texts.append(f"\n[kinds.{number}]\n{''.join(lines)}")
    for place, missing in described.refused.items():
        texts.append(f"\n# {place} has no description: it has {missing}\n")
    return "".join(texts)


def _value(value: Any) -> str:
    """Returns a value as TOML, which spells strings and numbers as JSON does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)
