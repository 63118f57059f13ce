"""Requests of the Open Inference Protocol that differ in their id and bytes only share a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from qkv.jobs.plan import Plan
from qkv.wire import open_inference
from support.engines import output_alone
from support.raw_connection import PATH, encode_body, random_inputs
from support.service import Server

SHAPE = (2, 4, 5, 6)


def send(server: Server, text: bytes, data: bytes, **headers: str) -> Any:
    headers |= {open_inference.LENGTH_HEADER: str(len(text))}
    return server.http.post(PATH, content=text + data, headers=headers)


def head_and_data(seed: int, **fields: Any) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON of a request, and the bytes of its tensors."""
    body, length = encode_body(random_inputs(seed, SHAPE), **fields)
    return orjson.loads(body[:length]), body[length:]


@pytest.fixture
def count_validations(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that returns the number of jobs validated in full so far."""
    count, validate = [0], Plan.from_message

    def counted(*args: Any) -> Plan:
        count[0] += 1
        return validate(*args)

    monkeypatch.setattr(Plan, "from_message", counted)
    return lambda: count[0]


def test_request_with_a_new_id_header_and_bytes_is_not_validated_again(
    serve: Callable[..., Server], count_validations: Callable[[], int]
) -> None:
    server = serve()
    outputs = [output_alone(random_inputs(seed, SHAPE)) for seed in range(8)]
    before = count_validations()
    for seed, output in enumerate(outputs):
        head, data = head_and_data(seed, id=f"request-{seed}")
        response = send(server, orjson.dumps(head), data, Accept=f"a/{seed}")
        assert response.status_code == 200, response.text
        at = int(response.headers[open_inference.LENGTH_HEADER])
        assert orjson.loads(response.content[:at])["id"] == f"request-{seed}"
        assert response.content[at:] == output
    assert count_validations() - before == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"datatype": "FP31"}, "unsupported datatype"),
        ({"parameters": {"binary_data_size": 8}}, "wrong binary_data_size"),
    ],
)
def test_invalid_tensor_is_rejected_every_time(
    server: Server, change: dict[str, Any], problem: str
) -> None:
    """Also between valid requests, whose plan is kept."""
    good, data = head_and_data(1)
    bad, _ = head_and_data(1)
    bad["inputs"][0].update(change)
    for _ in range(3):
        assert send(server, orjson.dumps(good), data).status_code == 200
        response = send(server, orjson.dumps(bad), data)
        assert response.status_code == 400
        assert problem in response.json()["error"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # the text after "id" of an inner object is no id
        ({"parameters": {"id": "%s"}, "inputs": 0, "id": "own"}, 400),
        ({"outputs": [{"name": "output", "id": "%s"}], "inputs": 0, "id": "own"}, 400),
        ({"parameters": {"scale": '["id":"%s"]'}, "inputs": 0}, 400),
    ],
    ids=["parameters", "output", "quoted"],
)
def test_an_id_elsewhere_is_no_id(server: Server, first: Any, then: int) -> None:
    head, data = head_and_data(6)
    for word in ("own", "other", "own"):
        text = orjson.dumps(first | {"inputs": head["inputs"]}).replace(b"%s", word.encode())
        assert send(server, text, data).status_code == then


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (b'"id":"1\\u0031"', "11"),
        (b'"\\u0069d":"2"', "2"),
        (b'"id" : ""', ""),
        ('"id":"\N{GREEK SMALL LETTER MU}"'.encode(), "\N{GREEK SMALL LETTER MU}"),
    ],
)
def test_every_spelling_of_an_id_comes_back(server: Server, text: bytes, id: str) -> None:
    head, data = head_and_data(7)
    for spelled, expected in ((text, id), (b'"id":"plain"', "plain"), (text, id)):
        body = b"{" + spelled + b"," + orjson.dumps({"inputs": head["inputs"]})[1:]
        assert send(server, body, data).json()["id"] == expected


@pytest.mark.parametrize("text", [b'"id":"1","id":"2"', b'"id":"1\0"', b'"id":"1\n"', b'"id":1'])
def test_wrong_id_is_rejected_between_right_ones(server: Server, text: bytes) -> None:
    head, data = head_and_data(8)
    inputs = orjson.dumps({"inputs": head["inputs"]})[1:]
    for word in (b"1", b"2"):
        assert send(server, b'{"id":"' + word + b'",' + inputs, data).status_code == 200
        assert send(server, b"{" + text + b"," + inputs, data).status_code == 400


def test_head_without_a_length_or_past_the_body_or_too_long_is_decoded() -> None:
    assert open_inference.split_head(b"{}", None) is None
    assert open_inference.split_head(b"{}", 3) is None
    assert open_inference.split_head(b" " * 4096, 4096) is None
