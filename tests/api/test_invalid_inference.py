"""Every row of the table of invalid requests to /v2 is refused; so are those that expand."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from support.invalid_inference import CRAFTED, OF_FIELDS, OF_VALUES, Rows
from support.open_inference_requests import (
    INFER_PATH,
    LENGTH_HEADER,
    error_of,
    post,
    request_with_lists,
)
from support.openapi_schemas import assert_matches_document, body_schema, fits
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


@pytest.mark.parametrize(("body", "length", "words"), CRAFTED.values(), ids=CRAFTED)
def test_invalid_message_is_refused(
    server: Server, body: bytes, length: int | None, words: str
) -> None:
    response = post(server, body, {} if length is None else {LENGTH_HEADER: str(length)})
    assert response.status_code in (400, 413)
    message = error_of(response, response.status_code)
    assert words in message
    assert len(message) < 600


@pytest.mark.parametrize(("rows", "schema_accepts"), [(OF_FIELDS, False), (OF_VALUES, True)])
def test_invalid_field_is_refused_and_the_schema_agrees(
    server: Server, rows: Rows, schema_accepts: bool
) -> None:
    document = server.http.get("/openapi.json").json()
    schema = body_schema(document, INFER_PATH)
    for fields, words in rows:
        body = request_with_lists() | fields
        response = post(server, body)
        assert words in error_of(response)
        assert fits(body, schema, document) is schema_accepts, words
    assert_matches_document(document, response)


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


@pytest.mark.slow
def test_rejected_parameters_leave_little_behind(server: Server) -> None:
    """Each request has 600 empty objects in 1.8 KiB of JSON; parsed, they take 50 KiB."""

    def send(number: int) -> None:
        parameters: dict[str, object] = {"unknown": [{}] * 600 + [number]}
        assert "unknown" in error_of(post(server, request_with_lists(parameters=parameters)))

    send(1000)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(100):
        send(number)
    gc.collect()
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert left < 3 << 20
