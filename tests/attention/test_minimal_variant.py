"""The 14 lines of `variants/README.md`, and broken files, in a copy of the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.client.client import Client
from support.added_variants import BROKEN, COSINE
from support.package_copies import CopiedService, environment


def arrays(seed: int = 0, batch: int = 2) -> dict[str, Any]:
    """Returns random inputs of cosine attention: 3 queries and 4 keys, in two heads."""
    random = np.random.default_rng(seed)
    shapes = {"query": (batch, 2, 3, 5), "key": (batch, 2, 4, 5), "value": (batch, 2, 4, 6)}
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def true_weights(query: np.ndarray, key: np.ndarray, **_: Any) -> np.ndarray:
    """Computes the weights of cosine attention in float64."""
    query, key = (x.astype(np.float64) for x in (query, key))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    exponentials = np.exp(query @ key.swapaxes(-1, -2))
    weights: np.ndarray = exponentials / exponentials.sum(-1, keepdims=True)
    return weights


@pytest.fixture(scope="module")
def process(copied_service: CopiedService) -> CopiedService:
    return copied_service


@pytest.fixture(scope="module")
def client(process: CopiedService) -> Iterator[Client]:
    with Client(str(process.http.base_url)) as client:
        yield client


def test_template_has_at_most_14_lines() -> None:
    assert 0 < len(COSINE.splitlines()) <= 14


def test_minimal_variant_has_output_and_full_weights(client: Client) -> None:
    inputs = arrays()
    run, A = client.attend("cosine", **inputs), true_weights(**inputs)
    np.testing.assert_allclose(run.weights, A, rtol=0, atol=1e-6)
    np.testing.assert_allclose(run.output, A @ inputs["value"], rtol=0, atol=1e-5)
    assert run.weights_are == "unnormalised"
    assert run.timing["flops"] == 2 * 2 * 2 * 3 * 4 * (5 + 6)
    found = client.gradients("cosine", grad_output=run.output, **inputs)
    assert found.timing["backend"] == "autograd"


def test_minimal_variant_is_in_catalogue_and_openapi(process: CopiedService) -> None:
    http = process.http
    entry = http.get("/v1/variants/cosine").json()
    assert entry["summary"] == "Cosine attention: a softmax of cosines."
    assert entry["formula"] == "A = softmax(Q' K'^T), x' = x / |x|; output = A V"
    assert (entry["paper"], entry["cost"]) == ("none", "not given")
    assert entry["weights"] == "unnormalised"
    assert entry["inputs"]["value"]["shape"] == ["B", "H", "S", "E"]
    assert entry["outputs"]["weights"]["shape"] == ["B", "H", "L", "S"]
    assert entry["gradients"] == ["query", "key", "value"]
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert set(schemas["CosineInputs"]["required"]) == {"query", "key", "value"}
    assert {"CosineRequest", "CosineProjectedRequest", "CosineResponse"} <= schemas.keys()
    assert {"/v1/attention/cosine", "/v1/gradients/cosine"} <= document["paths"].keys()
    assert entry["picture"] is None


def test_minimal_variant_rejects_parameters_and_wrong_shapes(process: CopiedService) -> None:
    inputs = {n: x.tolist() for n, x in arrays().items()}
    for body, pointer in (
        ({"parameters": {"causal": True}}, "/parameters/causal"),
        ({"inputs": inputs | {"value": inputs["query"]}}, "/inputs/value"),
    ):
        response = process.http.post("/v1/attention/cosine", json={"inputs": inputs} | body)
        assert response.status_code == 422, response.text
        assert response.json()["pointer"] == pointer


def test_serve_reports_the_problem_of_each_broken_file(
    process: CopiedService, copied_package: Path
) -> None:
    for name, (_, problem) in BROKEN.items():
        path = copied_package / "attention" / "variants" / f"{name}.py"
        (line,) = [
            x for x in process.messages.splitlines() if x.startswith(f"{path} is no variant")
        ]
        assert problem in line
    assert process.messages.count("def attend(\n        query: Float") == len(BROKEN)


def test_the_other_variants_are_served_beside_broken_ones(process: CopiedService) -> None:
    listed = [v["variant"] for v in process.http.get("/v1/variants").json()["variants"]]
    assert "cosine" in listed
    assert "softmax" in listed
    assert not set(listed) & BROKEN.keys()
    response = process.http.post("/v1/attention/b_return", json={"inputs": {}})
    assert response.status_code == 404
    assert "its file is broken" in response.json()["detail"]
    assert "/" not in response.json()["detail"].partition("there are")[0]  # no path of the machine


@pytest.mark.process
def test_local_command_skips_broken_files(copied_package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qkv", "variants", "--local"], cwd=copied_package.parent,
        env=environment(copied_package), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "cosine" in names
    assert not set(names) & BROKEN.keys()
    assert done.stderr.count("is no variant and is not served") == len(BROKEN)


@pytest.mark.process
def test_laws_include_new_files_and_fail_on_broken_ones(law_results: dict[str, str]) -> None:
    """Each law runs on both variants, stacked as on a GPU too; it skips what a file leaves out."""
    failed = {law for law, result in law_results.items() if result == "FAILED"}
    assert failed == {"test_no_variant_file_is_broken"}
    for name in ("cosine", "uniform"):
        passed = [law for law, result in law_results.items() if result == "PASSED" and name in law]
        assert {law.partition("[")[0] for law in passed} >= {
            "test_gradients_are_the_derivatives_of_the_reference",
            "test_inputs_of_other_variants_are_rejected_by_name",
            "test_outputs_fit_their_annotations",
            "test_parameters_of_other_variants_are_rejected_by_name",
            "test_same_bits_alone_and_in_a_batch",
            "test_variant_agrees_with_its_reference",
            "test_variant_passes_every_check",
        }
