"""Requests and responses of verify match the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import pytest

from qkv.wire import json, safetensors
from support.drawn_cases import PATH, draw
from support.known_requests import assert_problem
from support.openapi_schemas import (
    assert_matches_document,
    assert_same_example,
    body_schema,
    find_operation,
    fits,
    response_content,
)
from support.service import Server

SMALL: Final = {"B": 1, "H": 2, "L": 2, "S": 2, "D": 2}
GOOD: Final[list[dict[str, Any]]] = [
    {}, {"family": "mask"}, {"seed": None}, {"seed": 2**63 - 1}, {"seed": 3.0},
    {"sizes": {"B": 1, "H": 6, "G": 3}}, {"sizes": {"L": 2.0}}, {"parameters": {"causal": True}},
    {"dtype": "bfloat16"}, {"dtype": "float16", "encoding": "base64"}, {"encoding": None},
    {"gradients": True, "family": "steep"}, {"family": "nan behind mask"},
]  # fmt: skip


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def test_examples_are_those_of_the_service(server: Server, document: dict[str, Any]) -> None:
    operation = find_operation(document, "POST", PATH)
    content = operation["requestBody"]["content"]
    assert content.keys() == {json.MEDIA_TYPE, safetensors.MEDIA_TYPE}
    requests = content[json.MEDIA_TYPE]["examples"]
    shown = operation["responses"]["200"]["content"][json.MEDIA_TYPE]["examples"]
    assert requests.keys() == shown.keys() == {"draw", "judge"}
    for name, request in requests.items():
        assert fits(request["value"], body_schema(document, PATH), document)
        response = server.http.post(PATH, json=request["value"])
        assert_same_example(response.json(), shown[name]["value"])
        assert_matches_document(document, response)


@pytest.mark.parametrize("body", GOOD)
def test_schema_and_service_accept(
    server: Server, document: dict[str, Any], body: dict[str, Any]
) -> None:
    body = body | {"sizes": SMALL | body.get("sizes", {})}
    response = server.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert fits(body, body_schema(document, PATH), document)
    assert_matches_document(document, response)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", 1e30])
def test_verdict_on_odd_numbers_matches_the_document(
    server: Server, document: dict[str, Any], number: Any
) -> None:
    case = draw(server.http, sizes={"B": 1, "H": 1, "L": 1, "E": 2})
    body = {"case": case["case"], "outputs": {"output": [[[[number, 0]]]]}}
    assert fits(body, body_schema(document, PATH), document)
    response = server.http.post(PATH, json=body)
    assert response.json()["passed"] is False
    assert_matches_document(document, response)


def test_errors_match_the_document(server: Server, document: dict[str, Any]) -> None:
    large = server.http.post(PATH, json={"sizes": {"B": 10**6}})
    assert_problem(large, 413)
    assert_matches_document(document, large)
    missing = server.http.post("/v1/verify/sotfmax", json={})
    assert assert_problem(missing, 404) == response_content(document, missing)["example"]
