"""Requests that name a described layer: its proof is noted, and longer ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from support.described_checkpoints import PROOF, described_bert
from support.known_requests import assert_problem
from support.openapi_schemas import assert_matches_document
from support.service import Server, running_server

NAME: Final = "small.encoder.layer.1"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with a described layer, and the same without a bound."""
    folder = tmp_path_factory.mktemp("described")
    small = described_bert(folder / "small")
    longer = described_bert(folder / "longer", "longer = true")
    with running_server(checkpoints=f"small={small},longer={longer}") as server:
        yield server


def request(length: int, name: str = NAME, **layer: Any) -> dict[str, Any]:
    """Returns a request of some tokens."""
    x = [[0.1 * ((row + column) % 7) for column in range(16)] for row in range(length)]
    return {"inputs": {"x": x}, "layer": {"name": name, **layer}, "outputs": ["output"]}


def test_listing_has_error_length_and_versions(described: Server) -> None:
    listed = described.http.get(f"/v1/layers/{NAME}").json()
    assert listed["proof"] == PROOF
    assert listed["max_length"] == PROOF["length"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "gradients"])
def test_proof_is_noted_once(described: Server, kind: str) -> None:
    document = request(6)
    if kind == "gradients":
        document["inputs"]["grad_output"] = document["inputs"]["x"]
        del document["outputs"]
    response = described.http.post(f"/v1/{kind}/softmax", json=document)
    assert response.status_code == 200, response.text
    assert_matches_document(described.http.get("/openapi.json").json(), response)
    (note,) = response.json()["notes"]
    assert note == (
        f"{NAME} was compared with the real module: an error of 2.5e-07, for up to 6 tokens, with "
        "qkv 0.1.0, torch 2.13.0"
    )


def test_request_that_changes_the_layer_has_no_such_note(described: Server) -> None:
    document = request(6, window=[1, 1])
    response = described.http.post("/v1/attention/softmax", json=document)
    assert response.status_code == 200, response.text
    assert "notes" not in response.json()


@pytest.mark.parametrize(
    ("length", "parameters"), [(7, {}), (4, {"query_offset": 3}), (4, {"query_offset": 9})]
)
def test_longer_request_is_refused(
    described: Server, length: int, parameters: dict[str, Any]
) -> None:
    document = request(length) | {"parameters": parameters}
    problem = assert_problem(described.http.post("/v1/attention/softmax", json=document), 422)
    assert problem["pointer"] == "/inputs/x"
    assert "expected at most 6" in problem["detail"]


def test_line_allows_longer_requests(described: Server) -> None:
    document = request(20, "longer.encoder.layer.1")
    response = described.http.post("/v1/attention/softmax", json=document)
    assert response.status_code == 200, response.text


def test_residual_input_is_refused_because_no_norm_is_described(described: Server) -> None:
    document = request(6, input="residual")
    problem = assert_problem(described.http.post("/v1/attention/softmax", json=document), 422)
    assert problem["pointer"] == "/layer/input"
    assert "x is what its attention module receives" in problem["detail"]
