"""Requests and responses of verify match the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import pytest

from qkv.api.openapi.verify_schemas import PATH as TEMPLATE
from qkv.api.openapi.verify_schemas import examples
from qkv.wire import json, safetensors
from support.drawn_cases import PATH, draw
from support.known_requests import assert_problem
from support.openapi_schemas import fits, with_renamed_fields
from support.service import Server

SMALL: Final = {"B": 1, "H": 2, "L": 2, "S": 2, "D": 2}
GOOD: Final[list[dict[str, Any]]] = [
    {}, {"family": "mask"}, {"seed": None}, {"seed": 2**63 - 1}, {"seed": 3.0},
    {"sizes": {"B": 1, "H": 6, "G": 3}}, {"sizes": {"L": 2.0}}, {"parameters": {"causal": True}},
    {"dtype": "bfloat16"}, {"dtype": "float16", "encoding": "base64"}, {"encoding": None},
    {"gradients": True, "family": "steep"}, {"family": "nan behind mask"},
]  # fmt: skip
BAD: Final[list[dict[str, Any]]] = [
    {"nope": 1}, {"family": "nope"}, {"family": None}, {"seed": -1}, {"seed": 2**63},
    {"seed": True}, {"seed": "1"}, {"sizes": {"B": 0}}, {"sizes": {"Z": 1}}, {"sizes": []},
    {"sizes": {"B": "1"}}, {"parameters": {"nope": 1}}, {"parameters": None}, {"dtype": "int64"},
    {"encoding": "raw"}, {"gradients": 1}, {"case": None, "outputs": {"output": [1]}},
    {"case": "x", "outputs": {}}, {"case": "x"}, {"case": "x", "outputs": {"out": [1]}},
    {"outputs": {"output": [1]}}, {"case": "x", "outputs": {"output": [1]}, "seed": 1},
    {"case": "x" * 5000, "outputs": {"output": [1]}},
]  # fmt: skip


@pytest.fixture(scope="module")
def operation(server: Server) -> dict[str, Any]:
    """The operation, with the components of the document."""
    document: dict[str, Any] = server.http.get("/openapi.json").json()
    found: dict[str, Any] = document["paths"][TEMPLATE]["post"]
    return found | {"components": document["components"]}


def schema_of(part: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = part["content"][json.MEDIA_TYPE]["schema"]
    return found


def assert_documented(operation: dict[str, Any], response: Any) -> None:
    """Asserts that a response matches, and that copies of it with other names do not."""
    documented = operation["responses"][str(response.status_code)]
    schema = documented["content"][response.headers["content-type"]]["schema"]
    assert fits(response.json(), schema, operation), response.text
    for other in with_renamed_fields(response.json()):
        assert not fits(other, schema, operation), other


def test_examples_are_those_of_the_service(server: Server, operation: dict[str, Any]) -> None:
    """Only the tokens differ: the service has another secret."""
    content = operation["requestBody"]["content"]
    assert content.keys() == {json.MEDIA_TYPE, safetensors.MEDIA_TYPE}
    shown = operation["responses"]["200"]["content"][json.MEDIA_TYPE]["examples"]
    assert shown.keys() == examples().keys() == {"draw", "judge"}
    # the service refuses the token of an example, so the document shows no request with one
    assert content[json.MEDIA_TYPE]["examples"].keys() == {"draw"}
    token: dict[str, Any] = {}
    for name, (_, sent, _) in examples().items():
        assert fits(sent, schema_of(operation["requestBody"]), operation)
        response = server.http.post(PATH, json=sent | token)
        token = {"case": response.json().get("case")}
        expected = shown[name]["value"]
        assert response.json() == expected | (token if name == "draw" else {})
        assert_documented(operation, response)


@pytest.mark.parametrize(
    ("body", "is_good"), [*((b, True) for b in GOOD), *((b, False) for b in BAD)]
)
def test_schema_and_service_agree(
    server: Server, operation: dict[str, Any], body: dict[str, Any], is_good: bool
) -> None:
    if is_good:
        body = body | {"sizes": SMALL | body.get("sizes", {})}
    response = server.http.post(PATH, json=body)
    assert response.status_code == (200 if is_good else 422), response.text
    assert fits(body, schema_of(operation["requestBody"]), operation) is is_good
    assert_documented(operation, response)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", 1e30])
def test_verdict_on_odd_numbers_matches_the_document(
    server: Server, operation: dict[str, Any], number: Any
) -> None:
    case = draw(server.http, sizes={"B": 1, "H": 1, "L": 1, "E": 2})
    body = {"case": case["case"], "outputs": {"output": [[[[number, 0]]]]}}
    assert fits(body, schema_of(operation["requestBody"]), operation)
    response = server.http.post(PATH, json=body)
    assert response.json()["passed"] is False
    assert_documented(operation, response)


def test_errors_match_the_document(server: Server, operation: dict[str, Any]) -> None:
    for status, how in (
        (400, {"content": b"[]"}),
        (406, {"json": {}, "headers": {"Accept": "text/html"}}),
        (413, {"json": {"sizes": {"B": 10**6}}}),
        (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
    ):
        response = server.http.post(PATH, **how)
        assert_problem(response, status)
        assert_documented(operation, response)
    missing = server.http.post("/v1/verify/sotfmax", json={})
    shown = operation["responses"]["404"]["content"][json.PROBLEM_TYPE]["example"]
    assert assert_problem(missing, 404) == shown
