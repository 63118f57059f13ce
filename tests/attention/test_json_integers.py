"""Integer parameters that JSON writes as floats are integers, as JSON Schema says."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.attention import catalogue
from qkv.errors import InvalidContent
from support.each import each


@each(
    ("parameters", "name", "expected"),
    [
        ({"query_offset": 3.0}, "query_offset", 3),
        ({"query_offset": 2147483647.0}, "query_offset", 2**31 - 1),
        ({"query_offset": "end"}, "query_offset", "end"),
        ({"window": [2.0, None]}, "window", (2, None)),
        ({"seed": float(2**63)}, "seed", 2**63),
        ({"scale": 2.0}, "scale", 2.0),
    ],
)
def test_whole_float_is_an_integer(parameters: dict[str, Any], name: str, expected: Any) -> None:
    value = getattr(catalogue.find("softmax").parse(parameters), name)
    assert value == expected
    assert type(value) is type(expected)


@each(
    "parameters",
    [{"query_offset": 3.5}, {"query_offset": True}, {"window": [1.5, 2]}, {"seed": 1e300}],
)
def test_other_number_is_rejected(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidContent, match="valid integer"):
        catalogue.find("softmax").parse(parameters)
