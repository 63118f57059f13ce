"""Checks values and responses against the schemas of the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs  # of schemathesis, and much quicker than jsonschema
import numpy as np
import pytest

from support.known_requests import as_array

_VALIDATORS: dict[int, tuple[Any, jsonschema_rs.Draft202012Validator]] = {}
"""Each schema with its validator, which takes 17 ms to make, by the id of the schema."""


def fits(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """True if a schema of the document, with references into it, accepts a value."""
    if id(schema) not in _VALIDATORS:
        whole = {"components": document["components"], **schema}
        _VALIDATORS[id(schema)] = schema, jsonschema_rs.Draft202012Validator(whole)
    return _VALIDATORS[id(schema)][1].is_valid(value)


def find_operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """Returns the operation of a path, which may have a template such as `/v2/models/{model}`."""
    paths = document["paths"]
    templates = [path] if path in paths else [
        t for t in paths if "{" in t and re.fullmatch(re.sub(r"{\w+}", "[^/]+", t), path)
    ]  # fmt: skip
    found: dict[str, Any] = paths[templates[0]][method.lower()]
    return found


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of the JSON body that is sent to a path."""
    body = find_operation(document, "POST", path)["requestBody"]
    schema: dict[str, Any] = body["content"]["application/json"]["schema"]
    return schema


def assert_same_example(found: Any, shown: Any) -> None:
    """Asserts that a response is that of an example, but for times and the last bits of numbers.

    Another processor than that which made the examples may round differently.
    """
    if isinstance(shown, dict):
        assert found.keys() == shown.keys()
        if shown.keys() == {"dtype", "shape", "data"}:
            found, shown = ({"data": as_array(x).tolist()} for x in (found, shown))
        for name, value in shown.items():
            if not name.endswith("_ms") and name != "peak_bytes":
                assert_same_example(found[name], value)
    elif isinstance(shown, list):
        assert len(found) == len(shown)
        for pair in zip(found, shown, strict=True):
            assert_same_example(*pair)
    elif isinstance(shown, float):
        eps = float(np.finfo(np.float32).eps)
        assert found == pytest.approx(shown, rel=64 * eps, abs=64 * eps)
    else:
        assert found == shown


def response_content(document: dict[str, Any], response: httpx.Response) -> dict[str, Any]:
    """Returns the documented content of a response; asserts that it has the documented headers."""
    request = response.request
    operation = find_operation(document, request.method, request.url.path)
    found: dict[str, Any] = operation["responses"][str(response.status_code)]
    assert all(name in response.headers for name in found.get("headers", {}))
    assert ("Retry-After" in response.headers) == ("Retry-After" in found.get("headers", {}))
    content: dict[str, Any] = found["content"][response.headers["content-type"]]
    return content


_OPEN = ("tensors", "gradients", "parameters")  # names of a model, or of any variant


def with_renamed_fields(value: Any, within: str = "") -> Iterator[Any]:
    """Yields copies of a value with one name changed, for each name at any depth.

    Names in the field of that name are not changed where a schema leaves them open.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if within not in _OPEN:
                rest = {n: v for n, v in value.items() if n != name}
                yield rest | {f"{name}_": inner}
            for other in with_renamed_fields(inner, name):
                yield value | {name: other}


def assert_matches_document(document: dict[str, Any], response: httpx.Response) -> None:
    """Asserts that a JSON response matches the document, and that changed copies of it do not."""
    reply, schema = response.json(), response_content(document, response)["schema"]
    assert fits(reply, schema, document), reply
    for other in with_renamed_fields(reply):
        assert not fits(other, schema, document), other
