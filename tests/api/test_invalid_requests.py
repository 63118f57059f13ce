"""Every row of the table of invalid requests is refused, and the OpenAPI document agrees."""

from __future__ import annotations

from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv.jobs.job import Job
from qkv.tensors import RawTensor
from qkv.wire import json, safetensors
from qkv.wire.message import Message
from support.invalid_requests import INVALID, Refused
from support.known_requests import assert_problem
from support.openapi_schemas import assert_matches_document, body_schema, fits, response_content
from support.service import Server
from support.sweep_requests import submitted_jobs as submitted_jobs

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

GROUPS: Final = {
    "run": "inputs", "linear": "inputs", "item": "inputs", "layer": "inputs", "roles": "inputs",
    "compare": "inputs", "convert": "tensors", "judge": "outputs",
}  # fmt: skip
"""Group of the tensors of a request that may also be sent as a file."""


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def raws(tensors: dict[str, Any]) -> dict[str, RawTensor]:
    return {n: RawTensor.from_numpy(np.array(t, np.float32)) for n, t in tensors.items()}


def in_file(row: Refused, value: Any) -> bytes | None:
    """Returns the request in safetensors; None if its fault is not in the fields of the file."""
    group = GROUPS.get(row.request)
    # a file has no encoding of its own
    in_json = (f"/{group}/", "/layer/tensors/", "/encoding/")
    if group is None or not row.place or f"{row.place}/".startswith(in_json):
        return None
    fields = row.body(value)
    tensors, layer = raws(fields.pop(group)), fields.get("layer")
    held = {}
    if isinstance(layer, dict) and "tensors" in layer:
        held = raws(layer.pop("tensors"))
    return b"".join(safetensors.encode(Message(fields, tensors, held), group))


def assert_refused(row: Refused, response: httpx.Response, body: Any) -> None:
    problem = assert_problem(response, row.status, body)
    assert problem["pointer"] == row.pointer
    assert row.words in problem["detail"]


@pytest.mark.parametrize("row", INVALID, ids=str)
def test_invalid_request_is_refused_before_it_runs(
    server: Server,
    document: dict[str, Any],
    submitted_jobs: list[tuple[Job, int]],
    row: Refused,
) -> None:
    """The problem points to the fault, in JSON and in a file; the schema refuses the same JSON."""
    for value in row.values:
        body = row.body(value)
        response = server.http.post(row.path, json=body)
        assert_refused(row, response, body)
        schema = body_schema(document, row.path)
        assert fits(body, schema, document) is row.schema_accepts, value
        file = in_file(row, value)
        if file is not None:
            headers = {"Content-Type": safetensors.MEDIA_TYPE}
            assert_refused(row, server.http.post(row.path, content=file, headers=headers), body)
    assert_matches_document(document, response)
    assert submitted_jobs == []


JSON: Final = {"Content-Type": json.MEDIA_TYPE}
UNREADABLE: Final = (b"", b" \n", b"{", b"null", b"\xff", b'{"a": NaN}', b"{} x", b"\x00")
NOT_JSON: Final = (
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx",
    "json", "",
)  # fmt: skip
SHOWN: Final[list[tuple[int, dict[str, Any]]]] = [
    (400, {"content": b"[]", "headers": JSON}),
    (406, {"json": {}, "headers": {"Accept": "text/html"}}),
    (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
    (422, {"json": {"inputs": {}, "encoding": "raw"}}),
]
"""Requests whose problems are the examples of the document."""


def test_body_that_cannot_be_read_is_refused_on_every_path(
    server: Server, document: dict[str, Any]
) -> None:
    paths = [path for path, methods in document["paths"].items() if "post" in methods]
    for path in [p.replace("{variant}", "softmax") for p in paths if p.startswith("/v1")]:
        for content in UNREADABLE:
            assert_problem(server.http.post(path, content=content, headers=JSON), 400)
        repeated = server.http.post(path, content=b'{"a": 1, "a": 2}', headers=JSON)
        problem = assert_problem(repeated, 422)
        assert problem["detail"] == "'a' is repeated"
        assert problem["pointer"] == ("/shapes" if path == "/v1/layers" else "/a")
        for kind in NOT_JSON:
            response = server.http.post(path, content=b"{}", headers={"Content-Type": kind})
            assert "application/json" in assert_problem(response, 415)["detail"]
        response = server.http.post(path, content=b"{}", headers=JSON | {"Content-Encoding": "br"})
        assert "gzip" in assert_problem(response, 415)["detail"]
        never = {"Accept": "application/json;q=0"}
        assert_problem(server.http.post(path, json={}, headers=never), 406)
        for status, request in SHOWN:
            response = server.http.post(path, **request)
            problem = assert_problem(response, status)
            assert_matches_document(document, response)
            has_encoding = path not in ("/v1/sweep", "/v1/layers")
            if status != 422 or has_encoding:
                assert response_content(document, response)["example"] == problem
