"""A variant file with every part, added to a copy of the package: it is served, and no other file
changes."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from support.package_copies import copy_package, serving
from support.paths import ROOT

UNIFORM: Final = '''\
"""Uniform attention: each output row is the mean of the values, times a gain.

Formula: A = gain / S, output = A V.
Paper: none; it is what attention is when all scores are equal.
Cost: O(S E) time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64
from pydantic import Field
from torch import Tensor

FORMULA: Final = "A = gain / S; output = A V"
PAPER: Final = "none"
COST: Final = "O(S E) time"
WEIGHTS: Final = "unnormalised"
REFUSES: Final[Mapping[str, str]] = {"causal": "every query sees every key"}


class Uniform(NamedTuple):
    """The outputs of uniform attention."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None


def flops(sizes: Mapping[str, int]) -> int:
    """Counts one sum."""
    return 2 * sizes["B"] * sizes["G"] * sizes["S"] * sizes["E"]


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    *,
    gain: Annotated[float, Field(gt=0, le=100, description="Factor of the mean.")] = 1.0,
    outputs: frozenset[str] = frozenset({"output"}),
) -> Uniform:
    """Averages the values."""
    (B, H, L, _), (_, G, S, E) = query_BHLD.shape, value_BGSE.shape
    exact = torch.float64 if value_BGSE.dtype == torch.float64 else torch.float32
    mean_BGE = value_BGSE.to(exact).sum(2) * (gain / S)
    output_BHLE = mean_BGE.repeat_interleave(H // G, 1)[:, :, None].expand(B, H, L, E)
    weights_BHLS = torch.full((B, H, L, S), gain / S, dtype=exact, device=query_BHLD.device)
    return Uniform(
        output_BHLE.to(value_BGSE.dtype) if "output" in outputs else None,
        weights_BHLS if "weights" in outputs else None,
    )


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    *,
    gain: float = 1.0,
) -> Callable[[slice], Tensor]:
    """Returns the function from a slice of L to rows of A, (B, H, R, S)."""
    (B, H, _, _), S = query_BHLD.shape, key_BGSD.shape[2]
    exact = torch.float64 if query_BHLD.dtype == torch.float64 else torch.float32

    def rows_of(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return torch.full((B, H, rows.stop - rows.start, S), gain / S, dtype=exact)

    return rows_of


def reference(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, *, gain: float = 1.0
) -> Uniform:
    """Computes the textbook's line."""
    (B, H, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
    weights = torch.ones(B, H, L, S, dtype=torch.float64) / S * gain
    return Uniform(weights @ value_BGSE.double().repeat_interleave(H // G, 1), weights)
'''

QUERY: Final = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
KEY: Final = [[1.0, 2.0], [3.0, 4.0]]
VALUE: Final = [[1.0, 10.0, 0.5], [3.0, 30.0, 1.5]]
INPUTS: Final = {"query": QUERY, "key": KEY, "value": VALUE}

RUN: Final = "/v1/attention/uniform"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without changes."""
    return copy_package(tmp_path_factory.mktemp("original"), {})


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more file."""
    return copy_package(tmp_path_factory.mktemp("installed"), {"uniform.py": UNIFORM})


@pytest.fixture(scope="module")
def http(copy: Path) -> Iterator[httpx.Client]:
    """A client of a process that serves the copy."""
    with serving(copy) as service:
        assert not service.messages
        yield service.http


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
    post = document["paths"][RUN]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert body["parameters"]["properties"]["gain"]["maximum"] == 100
    assert {"query", "key", "value"} <= body["inputs"]["properties"].keys()
    assert "mask" not in body["inputs"]["properties"]
    assert "uniform" in str(post["responses"]["200"])


def test_new_variant_has_a_picture(http: httpx.Client) -> None:
    path = http.get("/v1/variants/uniform").json()["picture"]
    response = http.get(path)
    assert response.headers["content-type"] == "image/svg+xml"
    every_cell = "".join(f"M0 {i}h16v1h-16z" for i in range(16))
    assert f'd="{every_cell}"><title>0.0625</title>' in response.text


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"gain": 0}, "gain"),
        ({"gain": 101.0}, "gain"),
        ({"gain": "much"}, "gain"),
        ({"gain": None}, "gain"),
        ({"causal": True}, "every query sees every key"),
        ({"softcap": 3.0}, "gain"),  # says what there is
    ],
    ids=str,
)
def test_parameters_of_new_variant_are_validated(
    http: httpx.Client, parameters: dict[str, Any], named: str
) -> None:
    problem = refused(http, parameters=parameters)
    assert problem["pointer"] == f"/parameters/{next(iter(parameters))}"
    assert named in problem["detail"]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("axes", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
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


@pytest.mark.process
def test_contract_tests_include_new_variant(copy: Path) -> None:
    """The contract tests run on the copy, and include the new variant."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "uniform",
         "tests/attention/laws/test_contract.py"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(copy.parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


def test_no_other_file_is_changed(original: Path, copy: Path, http: httpx.Client) -> None:
    """The copy is the original and one file."""
    assert http.get("/livez").is_success

    def differing(compared: filecmp.dircmp[str], where: Path) -> Iterator[Path]:
        assert not compared.left_only
        assert not compared.funny_files
        _, mismatched, errors = filecmp.cmpfiles(
            compared.left, compared.right, compared.common_files, shallow=False
        )
        yield from (where / name for name in mismatched + errors + compared.right_only)
        for name, below in compared.subdirs.items():
            yield from differing(below, where / name)

    compared = filecmp.dircmp(original, copy, ignore=["__pycache__"])
    assert list(differing(compared, Path())) == [Path("attention/variants/uniform.py")]
