"""Limits of small requests to /v2 that expand, and rejection of repeated headers."""

from __future__ import annotations

import pytest

from support.oip_requests import INFER_PATH, LENGTH_HEADER, error_of, post, request_with_lists
from support.service import Server


@pytest.mark.parametrize(
    "text",
    ["[" * 2000, "[" + "[]," * 1000 + "[]]", "[" * 40 + "]" * 40, "[1", '{"a":1,"a":2}'],
)
def test_json_in_a_parameter_string_has_the_usual_limits(server: Server, text: str) -> None:
    assert "window" in error_of(post(server, request_with_lists(parameters={"window": text})))


@pytest.mark.parametrize("second", ["3", "217", "0"])
def test_two_length_headers_are_rejected(server: Server, second: str) -> None:
    request = server.http.build_request("POST", INFER_PATH, json=request_with_lists())
    lengths = [(LENGTH_HEADER, str(len(request.content))), (LENGTH_HEADER, second)]
    headers = [(name.decode(), value.decode()) for name, value in request.headers.raw]
    response = server.http.post(INFER_PATH, content=request.content, headers=[*headers, *lengths])
    assert "an integer" in error_of(response)


def test_unquoted_nan_and_infinity_are_limited(server: Server) -> None:
    data = b"NaN," * (1 << 18) + b"NaN"
    body = b'{"inputs":[{"name":"query","datatype":"FP32","shape":[1],"data":[%b]}]}' % data
    assert "without quotes" in error_of(post(server, body), 413)


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize("parameters", [[], 0, "", False])
def test_parameters_must_be_an_object(server: Server, verb: str, parameters: object) -> None:
    path = f"/v2/repository/models/softmax/{verb}"
    response = server.http.post(path, json={"parameters": parameters})
    assert "must be an object" in error_of(response)
    assert server.http.get("/v2/models/softmax/ready").status_code == 200
