"""A variant file with every part, added to a copy of the package: it is served, and no other file
changes."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
from support.added_variants import files
from support.each import each
from support.package_copies import CopiedService

QUERY: Final = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
KEY: Final = [[1.0, 2.0], [3.0, 4.0]]
VALUE: Final = [[1.0, 10.0, 0.5], [3.0, 30.0, 1.5]]
INPUTS: Final = {"query": QUERY, "key": KEY, "value": VALUE}

RUN: Final = "/v1/attention/uniform"


@pytest.fixture(scope="module")
def http(copied_service: CopiedService) -> httpx.Client:
    """Returns a client of a process that serves the copy."""
    assert "uniform" not in copied_service.messages
    return copied_service.http


def refused(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """Returns the problem document of the response to a body."""
    response = http.post(RUN, json={"inputs": INPUTS} | body)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    return problem


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


def test_new_variant_is_in_the_openapi_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    post, schemas = document["paths"][RUN]["post"], document["components"]["schemas"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert "#/components/schemas/UniformRequest" in str(body)
    assert schemas["UniformParameters"]["properties"]["gain"]["maximum"] == 100
    assert {"query", "key", "value"} <= set(schemas["UniformInputs"]["required"])
    assert "mask" not in schemas["UniformInputs"]["properties"]
    assert "UniformResponse" in str(post["responses"]["200"])


def test_new_variant_has_no_picture_until_one_is_drawn(http: httpx.Client) -> None:
    assert http.get("/v1/variants/uniform").json()["picture"] is None
    assert http.get("/v1/variants/uniform/picture").status_code == 404


@each(
    ("parameters", "named"),
    [
        ({"gain": 0}, "gain"),
        ({"gain": 101.0}, "gain"),
        ({"gain": "much"}, "gain"),
        ({"gain": None}, "gain"),
        ({"causal": True}, "every query sees every key"),
        ({"softcap": 3.0}, "gain"),  # says what there is
    ],
)
def test_parameters_of_new_variant_are_validated(
    http: httpx.Client, parameters: dict[str, Any], named: str
) -> None:
    problem = refused(http, parameters=parameters)
    assert problem["pointer"] == f"/parameters/{next(iter(parameters))}"
    assert named in problem["detail"]


@each(
    ("inputs", "pointer", "named"),
    [
        (INPUTS | {"key": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}, "/inputs/value", "S=2"),
        (INPUTS | {"key": [[1.0], [3.0]]}, "/inputs/key", "D=1"),
        (INPUTS | {"value": [1.0, 2.0]}, "/inputs/value", "[2]"),
        (INPUTS | {"mask": [[True, True]]}, "/inputs/mask", "mask"),
        ({"query": QUERY, "key": KEY}, "/inputs", "value"),
    ],
)
def test_tensors_of_new_variant_are_validated(
    http: httpx.Client, inputs: dict[str, Any], pointer: str, named: str
) -> None:
    problem = refused(http, inputs=inputs)
    assert problem["pointer"] == pointer
    assert named in problem["detail"]


@each("axes", [0, 1, 2])
@each("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_new_variant_computes_exact_numbers(http: httpx.Client, axes: int, dtype: str) -> None:
    """Small numbers make every rank and dtype exact, with all outputs and with one."""

    def lifted(rows: list[list[float]]) -> Any:
        return [[rows]] if axes == 2 else [rows] if axes == 1 else rows

    body = {
        "inputs": {name: lifted(rows) for name, rows in INPUTS.items()},
        "parameters": {"gain": 2.0},
        "dtype": dtype,
    }
    response = http.post(RUN, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["variant"] == "uniform"
    assert np.array_equal(found["outputs"]["output"], lifted([[4.0, 40.0, 2.0]] * 3))
    assert np.array_equal(found["outputs"]["weights"], lifted([[1.0, 1.0]] * 3))
    assert found["timing"]["flops"] == 2 * 2 * 3
    one = http.post(RUN, json=body | {"outputs": ["output"]}).json()["outputs"]
    assert one == {"output": found["outputs"]["output"]}


def test_new_variant_runs_behind_a_layer(http: httpx.Client) -> None:
    """A layer projects query, key and value of any variant that takes them."""
    weight = {f"W_{name}": [[1.0, 0.0], [0.0, 2.0]] for name in ("query", "key", "value")}
    layer = {"layout": "v1", "heads": 2, "tensors": weight}
    response = http.post(RUN, json={"inputs": {"x": KEY}, "layer": layer, "outputs": ["output"]})
    assert response.status_code == 200, response.text
    assert response.json()["outputs"] == {"output": [[2.0, 6.0], [2.0, 6.0]]}


def test_other_variants_are_still_served(http: httpx.Client) -> None:
    response = http.post("/v1/attention/softmax", json={"inputs": INPUTS})
    assert response.status_code == 200
    missing = http.post("/v1/attention/unifrom", json={"inputs": INPUTS})
    assert missing.status_code == 404
    assert "uniform" in missing.json()["detail"]


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
