"""What a small request to /v2 could make large is bounded, and what it says twice is refused."""

from __future__ import annotations

import pytest

from support.oip_requests import INFER_PATH, LENGTH_HEADER, error_of, post, request_with_lists
from support.service import Server


@pytest.mark.parametrize(
    "text",
    ["[" * 2000, "[" + "[]," * 1000 + "[]]", "[" * 40 + "]" * 40, "[1", '{"a":1,"a":2}'],
)
def test_json_in_a_parameters_string_has_the_limits_of_any_other(server: Server, text: str) -> None:
    assert "window" in error_of(post(server, request_with_lists(parameters={"window": text})))


@pytest.mark.parametrize("second", ["3", "217", "0"])
def test_two_lengths_are_none(server: Server, second: str) -> None:
    request = server.http.build_request("POST", INFER_PATH, json=request_with_lists())
    lengths = [(LENGTH_HEADER, str(len(request.content))), (LENGTH_HEADER, second)]
    headers = [(name.decode(), value.decode()) for name, value in request.headers.raw]
    response = server.http.post(INFER_PATH, content=request.content, headers=[*headers, *lengths])
    assert "whole number" in error_of(response)


def test_words_without_quotes_are_counted_first(server: Server) -> None:
    data = b"NaN," * (1 << 18) + b"NaN"
    body = b'{"inputs":[{"name":"query","datatype":"FP32","shape":[1],"data":[%b]}]}' % data
    assert "without quotes" in error_of(post(server, body), 413)


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize("parameters", [[], 0, "", False])
def test_a_models_parameters_are_an_object(server: Server, verb: str, parameters: object) -> None:
    path = f"/v2/repository/models/softmax/{verb}"
    response = server.http.post(path, json={"parameters": parameters})
    assert "must be an object" in error_of(response)
    assert server.http.get("/v2/models/softmax/ready").status_code == 200
