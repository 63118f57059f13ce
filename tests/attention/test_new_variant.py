"""A variant file with every part, added to a copy of the package: it is served, and no other file
changes."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest

import qkv
from support.added_variants import files
from support.package_copies import CopiedService

QUERY: Final = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
KEY: Final = [[1.0, 2.0], [3.0, 4.0]]
VALUE: Final = [[1.0, 10.0, 0.5], [3.0, 30.0, 1.5]]
INPUTS: Final = {"query": QUERY, "key": KEY, "value": VALUE}

RUN: Final = "/v1/attention/uniform"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def http(copied_service: CopiedService) -> httpx.Client:
    """Returns a client of a process that serves the copy."""
    assert "uniform" not in copied_service.messages
    return copied_service.http


def test_new_variant_is_in_the_catalogue(http: httpx.Client) -> None:
    entries = {v["variant"]: v for v in http.get("/v1/variants").json()["variants"]}
    assert "softmax" in entries
    entry = entries["uniform"]
    assert http.get("/v1/variants/uniform").json() == entry
    assert entry["summary"].startswith("Uniform attention")
    assert entry["formula"] == "A = gain / S; output = A V"
    gain = entry["parameters"]["properties"]["gain"]
    assert gain["type"] == "number"
    assert gain["exclusiveMinimum"] == 0
    assert gain["maximum"] == 100
    assert gain["default"] == 1.0
    assert gain["description"] == "Factor of the mean."
    assert entry["parameters"]["additionalProperties"] is False
    assert entry["refuses"] == {"causal": "every query sees every key"}
    assert {n: i["shape"] for n, i in entry["inputs"].items()} == {
        "query": ["B", "H", "L", "D"],
        "key": ["B", "G", "S", "D"],
        "value": ["B", "G", "S", "E"],
    }
    assert not any(i["optional"] for i in entry["inputs"].values())
    assert list(entry["outputs"]) == ["output", "weights"]


def test_new_variant_computes_exact_numbers(http: httpx.Client) -> None:
    """With all outputs and with one."""
    body = {"inputs": INPUTS, "parameters": {"gain": 2.0}}
    response = http.post(RUN, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["variant"] == "uniform"
    assert np.array_equal(found["outputs"]["output"], [[4.0, 40.0, 2.0]] * 3)
    assert np.array_equal(found["outputs"]["weights"], [[1.0, 1.0]] * 3)
    assert found["timing"]["flops"] == 2 * 2 * 3
    one = http.post(RUN, json=body | {"outputs": ["output"]}).json()["outputs"]
    assert one == {"output": found["outputs"]["output"]}


def test_no_other_file_is_changed(copied_package: Path, http: httpx.Client) -> None:
    """The copy is the installed package and the added files."""
    assert http.get("/livez").is_success
    original = Path(qkv.__file__).parent

    def differing(compared: filecmp.dircmp[str], where: Path) -> Iterator[Path]:
        assert not compared.left_only
        assert not compared.funny_files
        _, mismatched, errors = filecmp.cmpfiles(
            compared.left, compared.right, compared.common_files, shallow=False
        )
        yield from (where / name for name in mismatched + errors + compared.right_only)
        for name, below in compared.subdirs.items():
            yield from differing(below, where / name)

    compared = filecmp.dircmp(original, copied_package, ignore=["__pycache__"])
    added = {Path("attention/variants", name) for name in files()}
    assert set(differing(compared, Path())) == added
