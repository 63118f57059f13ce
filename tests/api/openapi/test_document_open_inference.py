"""Responses below /v2 match the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import httpx
import pytest

from support.openapi_schemas import fits, with_renamed_fields
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


def assert_documented(document: dict[str, Any], response: httpx.Response) -> None:
    """Asserts that the document accepts a response, and rejects it with a renamed field."""
    request = response.request
    template = request.url.path.replace("/models/softmax", "/models/{model}")
    template = template.replace("/models/none", "/models/{model}")
    documented = document["paths"][template][request.method.lower()]["responses"]
    content = documented[str(response.status_code)]["content"]
    reply, schema = response.json(), content[response.headers["content-type"]]["schema"]
    assert fits(reply, schema, document), reply
    for other in with_renamed_fields(reply):
        assert not fits(other, schema, document), other


@pytest.mark.parametrize("path", GETS)
def test_get_responses_match_the_document(
    server: Server, document: dict[str, Any], path: str
) -> None:
    server.http.post(INFER, json={"inputs": INPUTS})  # so that statistics exist
    assert_documented(document, server.http.get(path))


@pytest.mark.parametrize("verb", ["index", "models/softmax/unload", "models/softmax/load"])
def test_repository_matches_the_document(
    server: Server, document: dict[str, Any], verb: str
) -> None:
    try:
        assert_documented(document, server.http.post(f"/v2/repository/{verb}", json={}))
        assert_documented(document, server.http.get(f"{MODEL}/ready"))
    finally:
        server.http.post("/v2/repository/models/softmax/load")


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"id": "1", "parameters": {"causal": True, "priority": 1}, "model_name": "softmax"}, True),
        ({"outputs": [{"name": "weights", "parameters": {"binary_data": False}}]}, True),
        ({"inputs": [entry | {"data": [[1, 0], [0, 1]]} for entry in INPUTS]}, True),
        ({"id": 5}, False),
        ({"outputs": [{"name": 5}]}, False),
        ({"outputs": [{"parameters": {}}]}, False),
        ({"outputs": [{"name": "output", "data": []}]}, False),
        ({"unknown": 1}, False),
        ({"inputs": {}}, False),
        ({"inputs": [*INPUTS[:2], SQUARE]}, False),
        ({"inputs": [*INPUTS[:2], INPUTS[2] | {"datatype": "FP8"}]}, False),
        ({"inputs": [*INPUTS[:2], INPUTS[2] | {"shape": [-2, 2]}]}, False),
        ({"inputs": [*INPUTS[:2], INPUTS[2] | {"parameters": {"shared_memory": "a"}}]}, False),
        ({"inputs": [*INPUTS[:2], {k: v for k, v in INPUTS[2].items() if k != "data"}]}, False),
    ],
)  # fmt: skip
def test_schema_and_service_agree_on_requests(
    server: Server, document: dict[str, Any], fields: dict[str, Any], good: bool
) -> None:
    """The schema and the service accept the same requests."""
    body = {"inputs": INPUTS} | fields
    content = document["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]
    assert fits(body, content["application/json"]["schema"], document) == good
    response = server.http.post(INFER, json=body)
    assert response.status_code == (200 if good else 400), response.text
    assert_documented(document, response)


def test_example_gets_the_documented_response(server: Server, document: dict[str, Any]) -> None:
    operation = document["paths"]["/v2/models/{model}/infer"]["post"]
    request = operation["requestBody"]["content"]["application/json"]["example"]
    shown = operation["responses"]["200"]["content"]["application/json"]["example"]
    response = server.http.post(INFER, json=request).json()
    for document_ in (response, shown):
        document_["parameters"] = {
            n: v for n, v in document_["parameters"].items() if not n.endswith("_ms")
        }
    assert response == shown
