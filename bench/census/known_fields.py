"""Writes the fields of the known types and their defaults, from transformers, for the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING

from qkv.jobs.loaded import config_fields
from qkv.jobs.loaded.config_fields import HARMLESS
from qkv.jobs.loaded.known_models import KNOWN

FILE: Final = Path(config_fields.__file__).with_suffix(".json")


def as_text() -> str:
    """Returns the text of the file: a line for each type."""
    lines = [f"{json.dumps(name)}: {json.dumps(_fields(name))}" for name in sorted(KNOWN)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fields(model_type: str) -> dict[str, Any]:
    """Returns the fields of a type that are not harmless, other names of them too.

    Their values are the defaults; null for a list, which has a value for each layer.
    """
    config = CONFIG_MAPPING[model_type]()
    every = config.to_dict()
    every |= {name: every[of] for name, of in config.attribute_map.items() if of in every}
    return {
        name: None if isinstance(value, list) else value
        for name, value in sorted(every.items())
        if not HARMLESS.fullmatch(name)
    }
