"""The OpenAPI document is exact: valid, its examples run, and answers are what it says."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import numpy as np
import openapi_spec_validator
import pytest
from conftest import Server

from qkv import catalogue
from qkv.message import Message
from qkv.tensors import RawTensor
from qkv.wire import CODECS, json, safetensors

POSTS = ["/v1/convert", *(f"/v1/attention/{name}" for name in catalogue.variants())]


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """The document as it is served."""
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def valid(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    """Holds a value against a schema whose references lead into the document."""
    whole = {"components": document["components"], **schema}
    jsonschema.Draft202012Validator(whole).validate(value)


def test_it_is_a_valid_document(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)
    assert document["openapi"].startswith("3.1")


@pytest.mark.parametrize("path", POSTS)
def test_every_example_runs_and_is_answered_as_described(
    server: Server, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]
    assert content.keys() == CODECS.keys()
    example = content[json.MEDIA_TYPE]["example"]
    valid(example, content[json.MEDIA_TYPE]["schema"], document)
    answers = operation["responses"]["200"]["content"]
    assert answers.keys() == CODECS.keys()
    for encoding in ("lists", "base64"):
        response = server.http.post(path, json=example | {"encoding": encoding})
        assert response.status_code == 200, response.text
        valid(response.json(), answers[json.MEDIA_TYPE]["schema"], document)
    accepted = server.http.post(path, json=example, headers={"Accept": safetensors.MEDIA_TYPE})
    assert accepted.headers["content-type"] == safetensors.MEDIA_TYPE


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, {"content": b"[", "headers": {"Content-Type": json.MEDIA_TYPE}}),
        (406, {"json": {}, "headers": {"Accept": "text/html"}}),
        (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
        (422, {"json": {"nope": 1}}),
    ],
)
def test_every_fault_is_described(
    server: Server, document: dict[str, Any], path: str, status: int, sent: dict[str, Any]
) -> None:
    response = server.http.post(path, **sent)
    assert response.status_code == status
    described = document["paths"][path]["post"]["responses"][str(status)]["content"]
    assert described.keys() == {json.PROBLEM_TYPE}
    assert response.headers["content-type"] == json.PROBLEM_TYPE
    valid(response.json(), described[json.PROBLEM_TYPE]["schema"], document)


def test_nothing_is_described_that_does_not_happen(document: dict[str, Any]) -> None:
    assert "ValidationError" not in str(document["components"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status not in ("200", "503"):
                    assert response["content"].keys() == {json.PROBLEM_TYPE}, (path, status)


@pytest.mark.parametrize("name", catalogue.variants())
def test_parameters_are_described_per_variant(document: dict[str, Any], name: str) -> None:
    body = document["paths"][f"/v1/attention/{name}"]["post"]["requestBody"]["content"]
    parameters = body[json.MEDIA_TYPE]["schema"]["properties"]["parameters"]
    fields = catalogue.find(name).parameters.model_fields
    assert parameters["properties"].keys() == fields.keys()
    assert parameters["additionalProperties"] is False
    assert all(schema["description"] for schema in parameters["properties"].values())


def test_the_page_comes_from_here_alone(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in page.text.replace("// ", "")  # no other host
    for part in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert part in page.text
        assert server.http.get(f"/static-offline-docs/{part}").is_success


def test_safetensors_as_described(url: str) -> None:
    one = RawTensor.from_numpy(np.eye(2, dtype=np.float32))
    body = b"".join(
        safetensors.encode(Message({}, {"query": one, "key": one, "value": one}), "inputs")
    )
    response = httpx.post(
        f"{url}/v1/attention/softmax",
        content=body,
        headers={"Content-Type": safetensors.MEDIA_TYPE},
    )
    answer = safetensors.decode(response.content, "outputs")
    assert answer.tensors.keys() == {"output", "weights"}
    assert answer.fields["variant"] == "softmax"
