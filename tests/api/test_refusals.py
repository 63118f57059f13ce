"""Rejected requests: unknown paths, unsupported media types, exceeded limits."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from support.decoder_fuzz import MiB, assert_allocates_below
from support.json_requests import EXAMPLE, EYE, post, random_layer, run_request, tensors
from support.known_requests import Case, as_json, assert_problem
from support.processes import TIMEOUT_S
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def test_error_for_unknown_variant_lists_all_variants(server: Server) -> None:
    known = [v["variant"] for v in server.http.get("/v1/variants").json()["variants"]]
    assert "softmax" in known
    for method, path in (("POST", "/v1/attention/sofmax"), ("GET", "/v1/variants/sofmax")):
        problem = assert_problem(server.http.request(method, path, json=EXAMPLE), 404)
        assert "'sofmax'" in problem["detail"]
        assert all(name in problem["detail"] for name in known)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1", 404),
        ("POST", "/v1/attention", 404),
        ("POST", "/v1/attention/", 404),
        ("POST", "/v1/attention/a%2Fb", 404),
        ("POST", "/v1/attention/%ff%00", 404),
        ("POST", "/v1/attention/" + "a" * 5000, 404),
        ("POST", "/v1/attention/SOFTMAX", 404),
        ("POST", "/v1/attention/_scores", 404),
        ("POST", "/v1/attention/__init__", 404),
        ("GET", "/v1/attention/softmax", 405),
        ("PUT", "/v1/attention/softmax", 405),
        ("DELETE", "/v1/convert", 405),
        ("POST", "/v1/variants", 405),
        ("POST", "/livez", 405),
    ],
)
def test_unknown_paths_and_methods_are_rejected(
    server: Server, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path, json=EXAMPLE)
    assert_problem(response, status)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "media_type", ["application/json", "APPLICATION/JSON", "application/json; charset=utf-8", None]
)
def test_media_types_of_json_are_accepted(server: Server, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    body = json.dumps(EXAMPLE).encode()
    assert server.http.post("/v1/attention/softmax", content=body, headers=headers).is_success


@pytest.mark.parametrize("path", ["/v1/attention/softmax", "/v1/convert"])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_large_declared_body_is_rejected_before_it_is_sent(
    server: Server, path: str, expect: str
) -> None:
    limit = server.runtime.settings.max_body_bytes
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{expect}Content-Length: {10**12}\r\n\r\n"
        )
        connection.sendall(head.encode())
        response = connection.recv(65536).decode()
    assert response.startswith("HTTP/1.1 413 ")
    assert f"got {10**12} bytes, expected at most {limit}" in response


def test_body_larger_than_memory_is_rejected(serve: Callable[..., Server]) -> None:
    """The limit of bodies may exceed the memory."""
    server = serve(max_body_bytes=1 << 62)
    headers = {"Content-Type": "application/vnd.safetensors", "Content-Length": str(1 << 60)}
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n"
        connection.sendall(head.encode() + bytes(8))
        response = connection.recv(65536).decode()
    assert response.startswith("HTTP/1.1 413 ")
    assert f"out of memory for a body of {1 << 60} bytes" in response


def test_large_chunked_body_is_rejected_while_it_is_received(serve: Callable[..., Server]) -> None:
    server = serve(max_body_bytes=1000)
    for path in ("/v1/attention/softmax", "/v1/convert"):
        with socket.create_connection(server.address, TIMEOUT_S) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head.encode())
            for _ in range(11):
                connection.sendall(b"64\r\n" + b" " * 100 + b"\r\n")
            response = connection.recv(65536).decode()  # the last chunk is never sent
        assert response.startswith("HTTP/1.1 413 ")
        assert "more than 1000 bytes" in response
    exact = json.dumps(EXAMPLE).encode()
    assert post(server, exact.ljust(1000)).is_success
    problem = assert_problem(post(server, exact.ljust(1001)), 413)
    assert "1001" in problem["detail"]
    assert problem["limit"] == 1000
    assert server.http.post("/v1/attention/softmax", content=iter([exact, b" " * 500])).is_success
    assert_problem(
        server.http.post("/v1/attention/softmax", content=iter([exact, b" " * 1000])), 413
    )


def test_error_for_large_weights_names_a_smaller_form(
    server: Server, serve: Callable[..., Server]
) -> None:
    long = as_json(np.zeros((20_000, 1), np.float32), "base64")
    document = {"inputs": dict.fromkeys(("query", "key", "value"), long)}
    problem = assert_problem(post(server, document), 413)
    assert str(20_000 * 20_000 * 4 + 20_000 * 4) in problem["detail"]
    for form in ("stats", "rows", "top_k", "pool", "none"):
        assert f'"{form}"' in problem["detail"]
    assert '"weights": "none"' in problem["detail"]
    small = serve(max_response_bytes=64 * 64 * 4)
    case = Case({n: np.ones((64, 1), np.float32) for n in ("query", "key", "value")})
    for outputs, status in ((["output", "weights"], 413), (["weights"], 200), (["output"], 200)):
        assert post(small, case.document | {"outputs": outputs}).status_code == status
    forms: list[tuple[Any, int]] = [("stats", 200), ({"pool": 2}, 200), ({"top_k": 64}, 413)]
    for form, status in forms:
        document = {"inputs": case.document["inputs"], "weights": form}
        assert post(small, document).status_code == status
    tiny = serve(max_queue_bytes=100)
    assert run_request(tiny, EXAMPLE)["timing"]["bytes"] == 80
    assert "100" in assert_problem(post(tiny, EXAMPLE | {"dtype": "float64"}), 413)["detail"]


def test_too_many_scores_are_rejected(serve: Callable[..., Server]) -> None:
    server = serve(max_scores=2 * 4 * 3 * 5)
    case = Case(tensors(4), outputs=("output",))
    assert post(server, case.document).is_success
    more = Case(case.inputs | {"query": np.zeros((2, 4, 4, 8), "f4")}, outputs=("output",))
    assert str(2 * 4 * 4 * 5) in assert_problem(post(server, more.document), 413)["detail"]


@pytest.mark.parametrize("shape", [[2**60], [0, 2**60]], ids=str)
def test_declared_shapes_allocate_nothing(server: Server, shape: list[int]) -> None:
    """A tensor that declares 2**60 elements is rejected without allocating them."""
    huge = {"dtype": "float32", "shape": shape, "data": ""}
    weights = random_layer("v1", 2, 2)["tensors"] | {"W_query": huge}
    converted = {"from": "v1", "to": "v2", "tensors": weights}
    for path, document in (
        ("/v1/attention/softmax", {"inputs": EXAMPLE["inputs"] | {"query": huge}}),
        ("/v1/attention/softmax", {"inputs": EXAMPLE["inputs"] | {"value": huge}}),
        ("/v1/attention/softmax", {"inputs": {"x": huge}, "layer": random_layer("v1", 2, 2)}),
        ("/v1/attention/softmax", {
            "inputs": {"x": EYE}, "layer": {"layout": "v1", "tensors": weights},
        }),
        ("/v1/convert", converted),
    ):  # fmt: skip
        response = assert_allocates_below(16 * MiB, partial(post, server, document, path))
        assert_problem(response, 422, document)
