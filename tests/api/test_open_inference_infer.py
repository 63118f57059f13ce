"""Requests to /v2 that Triton's client does not send, byte by byte."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest

from qkv.attention import catalogue
from support.known_requests import assert_problem
from support.open_inference_requests import (
    INFER_PATH,
    INPUTS,
    LENGTH_HEADER,
    Array,
    error_of,
    input_entry,
    post,
    request_with_lists,
)
from support.service import Server

NATIVE: Final = "/v1/attention/softmax"
CODINGS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}
DTYPES: Final[dict[str, Any]] = {
    "FP64": np.float64,
    "FP32": np.float32,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


def in_binary(**fields: Any) -> tuple[bytes, bytes]:
    """Returns a request with binary inputs: its JSON, and the bytes."""
    inputs = []
    for name, array in INPUTS.items():
        inputs.append(input_entry(name, array, parameters={"binary_data_size": array.nbytes}))
        del inputs[-1]["data"]
    tail = b"".join(array.tobytes() for array in INPUTS.values())
    return json.dumps({"inputs": inputs} | fields).encode(), tail


def outputs(response: httpx.Response) -> dict[str, Array]:
    """Returns the outputs of a response, parsed without the codec of the service."""
    assert response.status_code == 200, response.text
    length = response.headers.get(LENGTH_HEADER)
    kind = "application/json" if length is None else "application/octet-stream"
    assert response.headers["content-type"] == kind
    document = json.loads(response.content[: None if length is None else int(length)])
    tail = b"" if length is None else response.content[int(length) :]
    found = {}
    for tensor in document["outputs"]:
        dtype = np.dtype(DTYPES[tensor["datatype"]])
        if "data" in tensor:
            flat = np.array(tensor["data"], np.float64).astype(dtype)
        else:
            size = tensor["parameters"]["binary_data_size"]
            flat, tail = np.frombuffer(tail[:size], dtype), tail[size:]
        found[tensor["name"]] = flat.reshape(tensor["shape"])
    assert not tail
    return found


@pytest.fixture(scope="module")
def right(server: Server) -> bytes:
    """The bits of the output from the native API."""
    response = server.http.post(
        NATIVE,
        json={
            "inputs": {name: array.tolist() for name, array in INPUTS.items()},
            "outputs": ["output"],
        },
    )
    rows = response.json()["outputs"]["output"]
    return np.array(rows, np.float32).tobytes()


def test_lists_may_be_flat_or_nested(server: Server, right: bytes) -> None:
    nested = [input_entry(name, array, data=array.tolist()) for name, array in INPUTS.items()]
    mixed = [nested[2], request_with_lists()["inputs"][0], nested[1]]
    for inputs in (request_with_lists()["inputs"], nested, mixed):
        response = post(server, {"inputs": inputs})
        assert outputs(response)["output"].tobytes() == right
        assert LENGTH_HEADER not in response.headers
        assert "id" not in response.json()
    for kind in ("application/json", "application/octet-stream", "text/plain"):
        response = server.http.post(
            INFER_PATH, content=json.dumps(request_with_lists()), headers={"Content-Type": kind}
        )
        assert outputs(response)["output"].tobytes() == right


@pytest.mark.parametrize("of_request", [None, True, False])
@pytest.mark.parametrize(("of_one", "of_other"), [(None, True), (False, None)])
def test_requested_outputs_are_binary(
    server: Server, of_request: bool | None, of_one: bool | None, of_other: bool | None
) -> None:
    entries = [
        {"name": name} | ({} if chosen is None else {"parameters": {"binary_data": chosen}})
        for name, chosen in (("weights", of_one), ("output", of_other))
    ]
    fields = {} if of_request is None else {"parameters": {"binary_data_output": of_request}}
    response = post(server, request_with_lists(outputs=entries, **fields))
    assert list(outputs(response)) == ["weights", "output"]
    document = json.loads(
        response.content[: int(response.headers.get(LENGTH_HEADER, len(response.content)))]
    )
    for tensor, chosen in zip(document["outputs"], (of_one, of_other), strict=True):
        assert ("data" not in tensor) == bool(of_request if chosen is None else chosen)
        assert ("parameters" in tensor) == ("data" not in tensor)


def test_id_may_be_any_string(server: Server) -> None:
    for name in ("", "7", "é 日本 \U0001f600", 'a"b\\c\n\0', "x" * 5000):
        assert post(server, request_with_lists(id=name)).json()["id"] == name
    assert "id" not in post(server, request_with_lists(id=None)).json()
    assert "id is invalid: got 7" in error_of(post(server, request_with_lists(id=7)))


def test_model_name_and_version_may_be_repeated(server: Server, right: bytes) -> None:
    for fields in (
        {"model_name": "softmax"},
        {"model_name": "softmax", "model_version": "1"},
        {"model_name": None, "model_version": "", "outputs": None, "parameters": None},
    ):
        assert outputs(post(server, request_with_lists(**fields)))["output"].tobytes() == right
    assert "expected 'softmax' as in the path" in error_of(
        post(server, request_with_lists(model_name="linear"))
    )
    assert "expected '1' as in the path" in error_of(
        post(server, request_with_lists(model_version="2"))
    )


def test_binary_body_may_come_in_chunks(server: Server, right: bytes) -> None:
    text, tail = in_binary(parameters={"binary_data_output": True})
    headers = {LENGTH_HEADER: str(len(text))}
    assert outputs(post(server, text + tail, headers))["output"].tobytes() == right
    whole = text + tail
    for size in (1, 7, len(text), len(whole)):
        pieces = (whole[i : i + size] for i in range(0, len(whole), size))
        response = post(server, pieces, headers)
        assert response.request.headers["transfer-encoding"] == "chunked"
        assert outputs(response)["output"].tobytes() == right
    plain = json.dumps(request_with_lists()).encode()
    assert outputs(post(server, iter([plain[:9], plain[9:]])))["output"].tobytes() == right
    all_json = post(server, plain, {LENGTH_HEADER: str(len(plain))})
    assert outputs(all_json)["output"].tobytes() == right


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_bodies(server: Server, right: bytes, coding: str) -> None:
    pack = CODINGS[coding]
    headers = {"Content-Encoding": coding}
    text, tail = in_binary(parameters={"binary_data_output": True})
    lengths = {LENGTH_HEADER: str(len(text))} | headers  # of the decompressed JSON
    packed = pack(text + tail)
    for content in (packed, iter([packed[:5], packed[5:]])):
        response = post(server, content, lengths | {"Accept-Encoding": coding})
        assert response.headers["content-encoding"] == coding
        assert outputs(response)["output"].tobytes() == right
    response = post(server, pack(json.dumps(request_with_lists()).encode()), headers)
    assert "gzip" in response.request.headers["accept-encoding"]  # one of several encodings
    assert "content-encoding" not in response.headers
    assert outputs(response)["output"].tobytes() == right
    for cut in (packed[:-9], packed[:20], b""):
        assert "ends too early" in error_of(post(server, cut, lengths))
    assert "bytes follow" in error_of(post(server, packed + b"x", lengths))
    assert "cannot be decompressed" in error_of(post(server, text + tail, lengths))
    assert "expected gzip, deflate" in error_of(post(server, packed, {"Content-Encoding": "br"}))


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_bodies_of_the_native_api(server: Server, coding: str) -> None:
    inputs = {name: array.tolist() for name, array in INPUTS.items()}
    plain = json.dumps({"inputs": inputs, "outputs": ["output"]}).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    packed = CODINGS[coding](plain)

    def ask(content: Any, **changed: str) -> httpx.Response:
        return server.http.post(NATIVE, content=content, headers=headers | changed)

    right = server.http.post(NATIVE, json=json.loads(plain)).json()["outputs"]
    assert ask(packed).json()["outputs"] == right
    assert ask(iter([packed[:5], packed[5:]])).json()["outputs"] == right
    assert_problem(ask(packed[:-9]), 400)
    assert_problem(ask(packed, **{"Content-Encoding": "br"}), 415)


@pytest.mark.parametrize("path", [INFER_PATH, NATIVE])
@pytest.mark.parametrize("coding", CODINGS)
def test_decompression_bomb_is_rejected(
    serve: Callable[..., Server], path: str, coding: str
) -> None:
    limit, size = 200_000, 20_000_000
    bomb = CODINGS[coding](b" " * size)
    assert len(bomb) < limit
    server = serve(max_body_bytes=limit)
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    tracemalloc.start()
    try:
        for content in (bomb, iter([bomb])):
            response = server.http.post(path, content=content, headers=headers)
            if path == INFER_PATH:
                assert "the decompressed body is too large: got more than 200000 bytes" in error_of(
                    response, 413
                )
            else:
                assert_problem(response, 413)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    assert "more than" in error_of(post(server, iter([b" " * limit, b" "])), 413)
    assert "at most" in error_of(post(server, b" " * (limit + 1)), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", INFER_PATH, 405), ("PUT", "/v2", 405), ("POST", "/v2/health/ready", 405),
        ("GET", INFER_PATH, 405),
        ("GET", "/v2/repository/index", 405),
        ("DELETE", "/v2/models", 405),
        ("GET", "/v2/nothing", 404), ("POST", "/v2/nothing", 404), ("HEAD", "/v2/nothing", 404),
        ("GET", "/v2/models/nope", 404), ("GET", "/v2/models/nope/ready", 404),
        ("POST", "/v2/models/nope/infer", 404), ("GET", "/v2/models/softmax/versions/2", 404),
        ("POST", "/v2/models/softmax/versions/2/infer", 404), ("GET", "/v2/models/%00", 404),
        ("GET", "/v2/models/" + "x" * 3000, 404), ("POST", "/v2/repository/models/x/load", 404),
        ("GET", "/v2/models/nope/stats", 404), ("GET", "/v2/models/softmax/versions/3/config", 404),
        ("POST", "/v2/repository/models/x/unload", 404),
    ],
)  # fmt: skip
def test_unknown_paths_and_models_are_rejected(
    server: Server, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path)
    if method == "HEAD":
        assert (response.status_code, response.content) == (status, b"")
    else:
        error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


def test_model_list_and_repository_index(server: Server) -> None:
    names = list(catalogue.variants())
    assert server.http.get("/v2/models").json() == {"models": names}
    index = "/v2/repository/index"
    for content in (b"", b" \n", b"{}", b'{"ready": false}', b'{"ready": true}'):
        entries = server.http.post(index, content=content).json()
        assert [e["name"] for e in entries] == names
        assert {(e["version"], e["state"], e["reason"]) for e in entries} == {("1", "READY", "")}
    for content, message in (
        (b'{"ready": 1}', "a valid boolean"),
        (b'{"foo": 1}', "unknown field"),
    ):
        assert message in error_of(server.http.post(index, content=content))
    error_of(server.http.post(index, content=b" " * 70_000), 413)


def test_server_timing_matches_the_parameters(server: Server) -> None:
    for fields in ({}, {"parameters": {"binary_data_output": True}}):
        response = post(server, request_with_lists(**fields))
        length = int(response.headers.get(LENGTH_HEADER, len(response.content)))
        timing = json.loads(response.content[:length])["parameters"]
        stages = ("queue", "transfer", "compute", "total")
        assert response.headers["server-timing"] == ", ".join(
            f"{stage};dur={timing[f'{stage}_ms']:.4f}" for stage in stages
        )
        assert {"batch_size", "device", "backend", "flops", "bytes"} < set(timing)


def test_draining_service_runs_requests_and_is_not_ready(serve: Callable[..., Server]) -> None:
    draining = serve()
    draining.runtime.worker.shared_state.drain()
    assert draining.http.get("/v2/health/live").json() == {"live": True}
    ready = draining.http.get("/v2/health/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    model_ready = draining.http.get("/v2/models/softmax/ready")
    assert "not ready" in error_of(model_ready, 503)
    assert int(model_ready.headers["retry-after"]) > 0
    response = post(draining, request_with_lists())
    assert response.status_code == 200
    assert response.headers["connection"] == "close"
