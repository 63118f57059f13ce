"""Checks the fields of a request beside its tensors, which are sent as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from qkv.errors import InvalidContent


def to_json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with the numbers and arrays of numpy as plain numbers and lists.

    Raises:
        InvalidContent: a value, at any depth, is not finite or has no place in JSON.
    """
    return {name: _to_json(value, name) for name, value in fields.items()}


def _to_json(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidContent(f"{name} has a name that is no text: got {key!r:.60}")
        return to_json_fields(value)
    if isinstance(value, list | tuple):
        return [_to_json(x, name) for x in value]
    if isinstance(value, float) and not math.isfinite(value):  # orjson would write null
        raise InvalidContent(f"{name} is not finite: got {value}")
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise InvalidContent(
            f"{name} cannot be sent: got {value!r:.60}, expected a value of JSON ({error})"
        ) from None
    return value
