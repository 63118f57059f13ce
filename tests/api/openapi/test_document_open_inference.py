"""Responses below /v2 match the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import pytest

from support.openapi_schemas import (
    assert_matches_document,
    assert_same_example,
    body_schema,
    fits,
)
from support.service import Server

MODEL: Final = "/v2/models/softmax"
INFER: Final = f"{MODEL}/infer"
GETS: Final = (
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/stats",
    MODEL, f"{MODEL}/ready", f"{MODEL}/stats", "/v2/models/none",
)  # fmt: skip
SQUARE: Final = {"datatype": "FP32", "shape": [2, 2], "data": [1, 0, 0, 1]}
INPUTS: Final = [SQUARE | {"name": name} for name in ("query", "key", "value")]


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


@pytest.mark.parametrize("path", GETS)
def test_get_responses_match_the_document(
    server: Server, document: dict[str, Any], path: str
) -> None:
    server.http.post(INFER, json={"inputs": INPUTS})  # so that statistics exist
    assert_matches_document(document, server.http.get(path))


@pytest.mark.parametrize("verb", ["index", "models/softmax/unload", "models/softmax/load"])
def test_repository_matches_the_document(
    server: Server, document: dict[str, Any], verb: str
) -> None:
    try:
        assert_matches_document(document, server.http.post(f"/v2/repository/{verb}", json={}))
        assert_matches_document(document, server.http.get(f"{MODEL}/ready"))
    finally:
        server.http.post("/v2/repository/models/softmax/load")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"id": "1", "parameters": {"causal": True, "priority": 1}, "model_name": "softmax"},
        {"outputs": [{"name": "weights", "parameters": {"binary_data": False}}]},
        {"inputs": [entry | {"data": [[1, 0], [0, 1]]} for entry in INPUTS]},
    ],
)  # fmt: skip
def test_schema_and_service_accept(
    server: Server, document: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = {"inputs": INPUTS} | fields
    assert fits(body, body_schema(document, INFER), document)
    response = server.http.post(INFER, json=body)
    assert response.status_code == 200, response.text
    assert_matches_document(document, response)


def test_example_gets_the_documented_response(server: Server, document: dict[str, Any]) -> None:
    operation = document["paths"]["/v2/models/{model}/infer"]["post"]
    requests = operation["requestBody"]["content"]["application/json"]["examples"]
    shown = operation["responses"]["200"]["content"]["application/json"]["examples"]
    assert requests.keys() == shown.keys()
    for name, request in requests.items():
        response = server.http.post(INFER, json=request["value"])
        assert_same_example(response.json(), shown[name]["value"])
