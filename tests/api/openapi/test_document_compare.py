"""Requests and responses of compare match the OpenAPI document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.wire import safetensors
from support.compare_requests import (
    COMPARE,
    VARIANTS,
    assert_same_report,
    post,
    random_inputs,
    variant_entry,
)
from support.openapi_schemas import assert_matches_document, body_schema, fits
from support.service import Server


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """The OpenAPI document."""
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def rounded(value: Any) -> Any:
    """Returns a part of a response whose numbers equal those within the roundings of float32.

    Processors round a sum differently, and errors of outputs near 1 consist of these roundings.
    """
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    few = 4 * float(np.finfo(np.float32).eps)
    return pytest.approx(value, rel=few, abs=few) if isinstance(value, float) else value


def test_every_example_gets_the_documented_response(
    server: Server, document: dict[str, Any]
) -> None:
    operation = document["paths"][COMPARE]["post"]
    content = operation["requestBody"]["content"]
    assert content.keys() == {"application/json", safetensors.MEDIA_TYPE}
    responses = operation["responses"]["200"]["content"]["application/json"]
    assert content["application/json"]["examples"].keys() == responses["examples"].keys()
    for name, example in content["application/json"]["examples"].items():
        assert fits(example["value"], body_schema(document, COMPARE), document)
        response = post(server, example["value"])
        assert response.status_code == 200, response.text
        assert_same_report(response.json(), rounded(responses["examples"][name]["value"]))
        assert fits(responses["examples"][name]["value"], responses["schema"], document)
        assert_matches_document(document, response)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_response_matches_the_document(
    server: Server, document: dict[str, Any], name: str
) -> None:
    inputs = {n: a.tolist() for n, a in random_inputs().items()}
    fields = {
        "variants": [variant_entry(name), variant_entry("softmax", causal=True)],
        "repeats": 1,
    }
    for more in ({}, {"rows": 0}, {"dtype": "float64"}, {"per_head": True}):
        body = {"inputs": inputs} | fields | more
        assert fits(body, body_schema(document, COMPARE), document)
        response = post(server, body)
        assert response.status_code == 200, response.text
        assert_matches_document(document, response)
