"""Tests of the checks of a loaded call."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import qkv
from qkv.errors import InvalidContent
from qkv.models.call_files import CallFacts, check_tensors, parse_calls

FIELDS: dict[str, Any] = {
    "layer": "a", "causal": True, "query_offset": 1, "window": [3, None], "scale": 0.5,
    "softcap": None, "heads": [2, 5, 6, 7], "items": [3, 1], "dropout": 0.0,
}  # fmt: skip
SHAPES = {"query": (2, 4, 3, 5), "key": (2, 2, 6, 5), "value": (2, 2, 6, 7), "output": (2, 4, 3, 7)}


def zeros(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Returns the tensors of a call, some with other shapes."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in (SHAPES | shapes).items()}


def parse(fields: Any) -> CallFacts:
    """Returns the facts of the second call of a file."""
    return parse_calls("f", json.dumps([FIELDS, fields]))[1]


def check(fields: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Checks a call in which some fields or tensors are others."""
    check_tensors("f: call 1", parse(FIELDS | (fields or {})), zeros() | tensors)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer": "", "causal": False, "query_offset": -(2**31), "window": None, "scale": -1},
        {"query_offset": 2**31 - 1, "window": [None, None], "softcap": 30, "dropout": 0.99},
        {"scale": 0, "window": [0, 0], "added_later": {}},
    ],
)
def test_right_fields_pass(fields: dict[str, Any]) -> None:
    check(fields)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_right_tensors_pass(dtype: torch.dtype) -> None:
    check(**zeros(dtype, query=(2, 4, 1, 5), output=(2, 4, 1, 7)))
    check(**(zeros(dtype) | {"query": torch.full(SHAPES["query"], torch.nan, dtype=dtype)}))
    check(mask=torch.ones(1, 4, 3, 6, dtype=torch.bool), sinks=torch.zeros(4, dtype=dtype))
    check(mask=torch.ones(2, 1, 1, 1, dtype=dtype), sinks=None)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layer", [None, 3, ["a"]]),
        ("causal", [None, 1, "true"]),
        ("query_offset", [None, True, 1.0, "1", 2**31, -(2**31) - 1]),
        ("window", [3, [1], [1, 2, 3], [-1, None], [True, None], [1.0, 1], "ab", {}]),
        ("scale", [None, True, "1", torch.nan, torch.inf, 10**400, [1]]),
        ("softcap", [True, 0, -1.0, torch.nan, torch.inf, "1"]),
        ("heads", [None, 4, "0123", [0, 1, 2, 2], [0, 1, 2, -1], [0, True, 2, 3], [[0]]]),
        ("items", [None, 2, "01", [1, 1], [0, -1], [0, 1.0], {"0": 0}]),
        ("dropout", [None, True, 1, -0.1, torch.nan, "0"]),
        ("is_self", [0, "true", []]),
    ],
)
def test_wrong_fields_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        expected = rf"^f: qkv_calls\.1\.{name}(\.\d)? is (invalid: got .+, .+|missing)$"
        with pytest.raises(InvalidContent, match=expected):
            parse(FIELDS | {name: value})


def test_wrong_field_says_what_was_expected() -> None:
    expected = "f: qkv_calls.1.heads is invalid: got [2,2], expected different numbers"
    with pytest.raises(InvalidContent) as caught:
        parse(FIELDS | {"heads": [2, 2]})
    assert caught.value.detail.replace(" ", "") == expected.replace(" ", "")


@pytest.mark.parametrize("name", FIELDS)
def test_missing_fields_are_named(name: str) -> None:
    fields = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(InvalidContent, match=rf"^f: qkv_calls\.1\.{name} is missing$"):
        parse(fields)


@pytest.mark.parametrize("fields", [None, 3, "layer", ["layer"]])
def test_call_that_is_no_object_is_refused(fields: Any) -> None:
    expected = rf"^f: qkv_calls\.1 is invalid: got {re.escape(json.dumps(fields))}, expected an obj"
    with pytest.raises(InvalidContent, match=expected):
        parse(fields)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"query": None}, "query is missing: expected (B,H,L,D)"),
        (
            {"query": torch.zeros(4, 3, 5)},
            "query is invalid: got the shape [4, 3, 5], expected (B,H,L,D) without",
        ),
        (zeros(query=(2, 4, 0, 5)), "query is invalid: got the shape [2, 4, 0, 5], expected (B,H"),
        (zeros(value=(2, 2, 6, 0)), "(B,G,S,E) without an axis of size 0"),
        (zeros(torch.int64), "query is invalid: got int64, expected float64 or float32 or"),
        ({"key": zeros(torch.float64)["key"]}, "key is invalid: got float64, expected float32"),
        ({"output": zeros(torch.bfloat16)["output"]}, "output is invalid: got bfloat16, expected"),
        (zeros(key=(2, 2, 6, 4)), "got the shape [2, 2, 6, 4], expected (B,G,S,D) with B=2, G=2,"),
        (zeros(key=(1, 2, 6, 5)), "key is invalid: got the shape [1, 2, 6, 5], expected"),
        (zeros(value=(2, 4, 6, 7)), "value is invalid: got the shape [2, 4, 6, 7], expected"),
        (zeros(value=(2, 2, 5, 7)), "value is invalid: got the shape [2, 2, 5, 7], expected"),
        (zeros(output=(2, 4, 3, 5)), "output is invalid: got the shape [2, 4, 3, 5], expected"),
        (
            zeros(key=(2, 3, 6, 5), value=(2, 3, 6, 7)),
            "key is invalid: got 3 heads, expected a divisor of the 4 query heads",
        ),
        (
            {"mask": torch.zeros(3, 6)},
            "mask is invalid: got the shape [3, 6], expected four axes that broadcast to "
            "[2, 4, 3, 6]",
        ),
        ({"mask": torch.zeros(1, 2, 3, 6)}, "mask is invalid: got the shape [1, 2, 3, 6]"),
        ({"mask": torch.zeros(1, 1, 3, 0)}, "mask is invalid: got the shape [1, 1, 3, 0]"),
        (
            {"mask": torch.zeros(1, 1, 3, 6, dtype=torch.int64)},
            "mask is invalid: got int64, expected bool or float64",
        ),
        ({"sinks": torch.zeros(2)}, "sinks is invalid: got the shape [2], expected [4]"),
        ({"sinks": torch.zeros(4, 1)}, "sinks is invalid: got the shape [4, 1], expected [4]"),
        (
            {"sinks": torch.zeros(4, dtype=torch.bool)},
            "sinks is invalid: got bool, expected float64",
        ),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidContent, match=re.escape(message)) as caught:
        check(**tensors)
    assert caught.value.detail.startswith("f: call 1: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"heads": [0, 1]},
            "heads is invalid: got 2 numbers, expected one for each of the 4 query",
        ),
        (
            {"items": []},
            "items is invalid: got 0 numbers, expected one for each of the 2 sequences",
        ),
    ],
)
def test_numbers_are_as_many_as_heads_and_sequences(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidContent, match=message):
        check(fields)


def test_errors_of_a_file_name_the_file_and_the_call(tmp_path: Path) -> None:
    path = tmp_path / "calls.safetensors"
    tensors = {f"calls.{n}.{name}": x for n in range(2) for name, x in zeros().items()}
    facts = [FIELDS, FIELDS | {"layer": "b", "causal": 1}]
    save_file(tensors, path, metadata={"qkv_calls": json.dumps(facts)})
    expected = f"{path} is no file of calls: qkv_calls.1.causal is invalid: got 1, expected a valid"
    with pytest.raises(InvalidContent, match=re.escape(expected)):
        qkv.load_calls(path)
    save_file(tensors, path, metadata={"qkv_calls": json.dumps([FIELDS] * 3)})
    expected = f'{path} is no file of calls: call 2, "a": query is missing: expected (B,H,L,D)'
    with pytest.raises(InvalidContent, match=re.escape(expected)):
        qkv.load_calls(path)
