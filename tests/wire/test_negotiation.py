"""Content negotiation over a real socket: formats of request and response are independent."""

from __future__ import annotations

import json as stdlib
import re
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from qkv.tensors import RawTensor
from qkv.wire import safetensors
from qkv.wire.message import Message
from support.known_requests import Array, Case, as_array, as_json, assert_problem, random_case
from support.service import Server

JSON, TENSORS = "application/json", "application/vnd.safetensors"
BOTH = (JSON, TENSORS)
RUN, CONVERT = "/v1/attention/softmax", "/v1/convert"
CASE = Case({n: np.eye(3, dtype="f4") for n in ("query", "key", "value")}, {"causal": True})
STATE = {
    f"W_{n}": np.arange(6, dtype="f4").reshape(2, 3) + i
    for i, n in enumerate(("query", "key", "value"))
}


pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def body_of(
    media_type: str,
    named: Mapping[str, Array],
    fields: dict[str, Any],
    group: str = "inputs",
    form: str = "base64",
) -> bytes:
    if media_type == JSON:
        written = {n: as_json(a, form) for n, a in named.items()}
        return stdlib.dumps(fields | {group: written}).encode()
    raw = {n: RawTensor.from_numpy(a) for n, a in named.items()}
    return b"".join(safetensors.encode(Message(fields, raw), group))


def post(server: Server, content: Any, path: str = RUN, **headers: str | None) -> httpx.Response:
    """Posts with these headers Content-Type and Accept."""
    named = {"content-type": headers.get("came"), "accept": headers.get("accept")}
    request = server.http.build_request("POST", path, content=content)
    for name, value in named.items():
        request.headers.pop(name, None)
        if value is not None:
            raw = (name.encode(), value.encode("latin-1"))
            request.headers = httpx.Headers([*request.headers.raw, raw])
    return server.http.send(request)


def read(response: httpx.Response, media_type: str, group: str = "outputs") -> dict[str, Array]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == media_type
    assert int(response.headers["content-length"]) == len(response.content)
    if media_type == JSON:
        return {n: as_array(t) for n, t in response.json()[group].items()}
    message = safetensors.decode(response.content, group)
    return {n: t.numpy() for n, t in message.tensors.items()}


def bits(named: Mapping[str, Array]) -> list[Any]:
    return [(n, a.dtype.name, a.shape, a.tobytes()) for n, a in named.items()]


def parse_fields(case: Case) -> dict[str, Any]:
    return {"parameters": case.parameters, "outputs": list(case.outputs)}


def run(server: Server, case: Case, request_type: str, accept: str | None) -> httpx.Response:
    content = body_of(request_type, case.inputs, parse_fields(case))
    return post(server, content, came=request_type, accept=accept)


@pytest.mark.parametrize("kind", range(4))
def test_same_bits_in_every_format(server: Server, kind: int) -> None:
    case = random_case(40_000 + kind, 0)
    seen = [
        bits(read(run(server, case, request_type, response_type), response_type))
        for request_type in BOTH
        for response_type in BOTH
    ]
    assert seen[1:] == seen[:1] * 3
    case.check(
        {n: as_json(a, "base64") for n, a in read(run(server, case, TENSORS, JSON), JSON).items()}
    )


def test_fields_and_timing_are_the_same_in_both_formats(server: Server) -> None:
    for request_type in BOTH:
        responses = [run(server, CASE, request_type, response_type) for response_type in BOTH]
        stages = [re.findall(r"(\w+);dur=[\d.]+", r.headers["server-timing"]) for r in responses]
        assert stages == [["queue", "transfer", "compute", "total"]] * 2
        as_text = responses[0].json()
        message = safetensors.decode(responses[1].content, "outputs")
        assert message.fields.keys() == as_text.keys() - {"outputs"}
        assert message.fields["variant"] == as_text["variant"] == "softmax"
        assert list(message.fields["timing"]) == list(as_text["timing"])


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, None),
        ("", None),
        ("*/*", None),
        ("application/*", None),
        ("*/*;q=0.1", None),
        ("text/html, */*;q=0.8", None),
        (JSON, JSON),
        ("Application/JSON", JSON),
        (f"{JSON}; charset=utf-8", JSON),
        (TENSORS, TENSORS),
        (f"text/plain, {TENSORS}", TENSORS),
        (f"{TENSORS};q=0.5, {JSON}", JSON),
        (f"{TENSORS}, {JSON};q=0.5", TENSORS),
        (f"{JSON};q=0.2,{TENSORS};q=0.3,*/*;q=0.1", TENSORS),
        (f"{JSON} ; q=0.2 , {TENSORS} ; q=0.9", TENSORS),
        (f"{JSON};q=0, {TENSORS}", TENSORS),
        (f"{TENSORS};q=0, {JSON};q=0.001", JSON),
        (f"{JSON};q=0, */*", TENSORS),
        (f"{TENSORS};q=0, application/*", JSON),
        (f",, {JSON},", JSON),
    ],
)
@pytest.mark.parametrize("request_type", BOTH)
def test_response_has_the_preferred_format(
    server: Server, request_type: str, accept: str | None, expected: str | None
) -> None:
    """RFC 9110, section 12.5.1: the most specific range decides the quality of a type."""
    read(run(server, CASE, request_type, accept), expected or request_type)


@pytest.mark.parametrize(
    "accept",
    ["text/html", "image/*", f"{JSON};q=0", "*/*;q=0", f"{JSON};q=x", "json", ";", "\xff"],
)
@pytest.mark.parametrize("request_type", BOTH)
def test_unsupported_accept_is_406(server: Server, request_type: str, accept: Any) -> None:
    for path in (RUN, CONVERT):
        assert (
            TENSORS
            in assert_problem(post(server, b"{}", path, came=request_type, accept=accept), 406)[
                "detail"
            ]
        )


@pytest.mark.parametrize("request_type", BOTH)
def test_several_accept_headers_are_one_list(server: Server, request_type: str) -> None:
    """RFC 9110, section 5.3."""
    headers = [("content-type", request_type), ("accept", "text/html"), ("accept", TENSORS)]
    content = body_of(request_type, CASE.inputs, parse_fields(CASE))
    read(server.http.post(RUN, content=content, headers=headers), TENSORS)


@pytest.mark.parametrize("accept", [TENSORS, "text/html"])
@pytest.mark.parametrize("request_type", BOTH)
def test_errors_are_problem_documents_for_any_accept(
    server: Server, request_type: str, accept: str
) -> None:
    good = accept != "text/html"
    wrong = body_of(request_type, CASE.inputs, {"parameters": {"causal": "yes"}})
    problem = assert_problem(
        post(server, wrong, came=request_type, accept=accept), 422 if good else 406
    )
    assert not good or problem["pointer"] == "/parameters/causal"
    assert_problem(
        post(server, b"\xff" * 20, came=request_type, accept=accept), 400 if good else 406
    )
    assert_problem(post(server, b"{}", came="text/plain", accept=accept), 415)
    assert_problem(
        post(server, b"{}", "/v1/attention/sofmax", came=request_type, accept=accept), 404
    )
    assert_problem(server.http.get(RUN, headers={"accept": accept}), 405)


def test_json_responses_to_safetensors_are_base64_by_default(server: Server) -> None:
    for encoding, expected_type in ((None, dict), ("base64", dict), ("lists", list)):
        fields = parse_fields(CASE) | ({} if encoding is None else {"encoding": encoding})
        content = body_of(TENSORS, CASE.inputs, fields)
        response = post(server, content, came=TENSORS, accept=JSON)
        assert all(isinstance(t, expected_type) for t in response.json()["outputs"].values())
        CASE.check(response.json()["outputs"])


def test_response_to_lists_may_be_safetensors(server: Server) -> None:
    content = body_of(JSON, CASE.inputs, parse_fields(CASE), form="lists")
    named = read(post(server, content, came=JSON, accept=TENSORS), TENSORS)
    assert bits(named) == bits(read(run(server, CASE, TENSORS, TENSORS), TENSORS))


@pytest.mark.parametrize("request_type", BOTH)
@pytest.mark.parametrize("response_type", BOTH)
def test_weights_convert_in_both_formats(
    server: Server, request_type: str, response_type: str
) -> None:
    content = body_of(request_type, STATE, {"from": "v1", "to": "v2"}, "tensors")
    response = post(server, content, CONVERT, came=request_type, accept=response_type)
    named = read(response, response_type, "tensors")
    assert bits(named) == bits({f"{n}.weight": w.T for n, w in STATE.items()})
    fields = (
        response.json()
        if response_type == JSON
        else safetensors.decode(response.content, "").fields
    )
    assert (fields["from"], fields["to"]) == ("v1", "v2")
    assert fields["check"]["largest_absolute_difference"] < 1e-9


@pytest.mark.parametrize("response_type", BOTH)
def test_layer_in_both_formats(server: Server, response_type: str) -> None:
    x, layer = np.eye(2, dtype="f4"), {n: RawTensor.from_numpy(w) for n, w in STATE.items()}
    message = Message({"layer": {"layout": "v1"}}, {"x": RawTensor.from_numpy(x)}, layer)
    content = b"".join(safetensors.encode(message, "inputs"))
    document = {
        "inputs": {"x": as_json(x, "base64")},
        "layer": {
            "layout": "v1", "tensors": {n: as_json(w, "base64") for n, w in STATE.items()}
        },
    }  # fmt: skip
    one = read(post(server, content, came=TENSORS, accept=response_type), response_type)
    other = read(
        post(server, stdlib.dumps(document).encode(), came=JSON, accept=response_type),
        response_type,
    )
    assert bits(one) == bits(other)


def test_tensors_of_an_unused_layer_are_rejected(server: Server) -> None:
    """No part of a request is ignored silently."""
    content = body_of(TENSORS, CASE.inputs | {"layer.extra": np.ones(2, "f4")}, {})
    problem = assert_problem(post(server, content, RUN, came=TENSORS))
    assert "layer" in problem["detail"]


def test_names_of_a_conversion_may_begin_with_layer(server: Server) -> None:
    """A BERT encoder has such names. Only beside inputs they stand for the tensors of a layer."""
    named = {f"layer.0.{name}": array for name, array in STATE.items()} | {"other": np.ones(2)}
    fields = {"from": "v1", "to": "v2", "prefix": "layer.0"}
    content = body_of(TENSORS, named, fields)
    response = post(server, content, CONVERT, came=TENSORS, accept=TENSORS)
    reply = safetensors.decode(response.content, "tensors")
    assert reply.fields["prefix"] == "layer.0"
    assert reply.tensors["W_query.weight"].numpy().T.tobytes() == STATE["W_query"].tobytes()


@pytest.mark.parametrize("cut", [1, 9, 1000])
def test_safetensors_may_come_in_chunks(server: Server, cut: int) -> None:
    case = random_case(40_100, 0)
    whole = body_of(TENSORS, case.inputs, parse_fields(case))
    pieces = [whole[at : at + cut] for at in range(0, min(len(whole), 60 * cut), cut)]
    pieces.append(whole[min(len(whole), 60 * cut) :])
    response = post(server, iter([p for p in pieces if p]), came=TENSORS)
    assert "content-length" not in response.request.headers
    assert bits(read(response, TENSORS)) == bits(read(run(server, case, TENSORS, TENSORS), TENSORS))
    for short in (b"", whole[:5], whole[:-1]):
        assert_problem(post(server, iter([short]), came=TENSORS), 400)
        assert_problem(post(server, short, came=TENSORS), 400)


@pytest.mark.parametrize(
    "parameters", [{"query_offset": 2**70}, {"seed": 2**64}, {"window": [2**63, 1]}], ids=str
)
def test_integers_beyond_64_bits_in_metadata_are_refused(
    server: Server, parameters: dict[str, Any]
) -> None:
    """Python's parser of metadata reads them; simdjson makes them floats."""
    metadata = {"__metadata__": {"qkv": stdlib.dumps({"parameters": parameters})}}
    plain = body_of(TENSORS, CASE.inputs, {})
    length = int.from_bytes(plain[:8], "little")
    header = stdlib.dumps(stdlib.loads(plain[8 : 8 + length]) | metadata).encode()
    content = len(header).to_bytes(8, "little") + header + plain[8 + length :]
    assert_problem(post(server, content, came=TENSORS), 422)
