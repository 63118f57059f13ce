"""The service over a real socket: what it promises to answer, and how it refuses the rest."""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cases import DTYPES, FLOATING, Case, as_array, as_json, random_case, refused
from conftest import PATIENCE, Process, Server
from hypothesis import given, settings
from hypothesis import strategies as st

EYE = [[1, 0], [0, 1]]
EXAMPLE: dict[str, Any] = {"inputs": {"query": EYE, "key": EYE, "value": [[1, 2], [3, 4]]}}
TENSORS = ("query", "key", "value")
LEADS = {2: (), 3: (2,), 4: (2, 4)}
TIMES = ("queue_ms", "transfer_ms", "compute_ms", "total_ms")


pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def post(server: Server, document: Any, path: str = "/v1/attention/softmax") -> httpx.Response:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return server.http.post(path, content=body, headers={"Content-Type": "application/json"})


def ask(server: Server, document: Any, **fields: Any) -> dict[str, Any]:
    response = post(server, document | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


def tensors(rank: int, dtype: str = "float32", seed: int = 0, groups: int = 2) -> dict[str, Any]:
    """query, key and value with L=3, S=5, D=8, E=6."""
    draw = np.random.default_rng(seed)
    lead = LEADS[rank]
    few = (2, groups) if rank == 4 else lead
    shapes = {"query": (*lead, 3, 8), "key": (*few, 5, 8), "value": (*few, 5, 6)}
    return {n: draw.normal(size=shape).astype(DTYPES[dtype]) for n, shape in shapes.items()}


# what is answered


def test_the_example_of_the_design(server: Server) -> None:
    answer = ask(server, EXAMPLE | {"parameters": {"causal": True}, "weights": "full"})
    assert list(answer) == ["variant", "outputs", "weights_are", "timing"]
    assert answer["variant"] == "softmax"
    outputs = {name: np.round(tensor, 4).tolist() for name, tensor in answer["outputs"].items()}
    assert outputs == {
        "output": [[1.0, 2.0], [2.3395, 3.3395]],
        "weights": [[1.0, 0.0], [0.3302, 0.6698]],
    }
    timing = answer["timing"]
    assert {n: timing[n] for n in timing if n not in TIMES} == {
        "batch_size": 1, "device": "cpu", "backend": "explicit", "flops": 32, "bytes": 80,
    }  # fmt: skip


@pytest.mark.parametrize("encoding", ["lists", "base64"])
@pytest.mark.parametrize("rank", LEADS)
def test_the_answer_has_the_rank_of_the_request(server: Server, rank: int, encoding: str) -> None:
    case = Case(tensors(rank), encoding=encoding)
    outputs = ask(server, case.document)["outputs"]
    case.check(outputs)
    assert list(outputs) == ["output", "weights", "scores"]
    assert as_array(outputs["output"]).shape == (*LEADS[rank], 3, 6)
    assert as_array(outputs["weights"]).shape == (*LEADS[rank], 3, 5)
    assert as_array(outputs["scores"]).shape == (*LEADS[rank], 3, 5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_query_heads_read_their_group_of_key_heads(server: Server, groups: int) -> None:
    case = Case(tensors(4, groups=groups))
    grouped = ask(server, case.document)["outputs"]
    case.check(grouped)
    repeated = {
        n: a if n == "query" else a.repeat(4 // groups, axis=1) for n, a in case.inputs.items()
    }
    Case(repeated).check(grouped)


@pytest.mark.parametrize("kind", ["bool", *FLOATING])
@pytest.mark.parametrize("rank", LEADS)
def test_masks_broadcast_from_the_right(server: Server, rank: int, kind: str) -> None:
    draw = np.random.default_rng(rank)
    whole = (*LEADS[rank], 3, 5)
    shapes = [whole[i:] for i in range(rank + 1)]
    shapes += [tuple(1 if i == axis else n for i, n in enumerate(whole)) for axis in range(rank)]
    for shape in shapes:
        allowed = draw.random(shape) < 0.6
        mask = np.where(allowed, draw.normal(size=shape), -np.inf).astype(DTYPES[kind])
        inputs = tensors(rank) | {"mask": allowed if kind == "bool" else mask}
        for encoding in ("lists", "base64"):
            case = Case(inputs, encoding=encoding)
            case.check(ask(server, case.document)["outputs"])


@pytest.mark.parametrize("rank", LEADS)
def test_key_lengths_hide_padding(server: Server, rank: int) -> None:
    lengths = np.array([2, 5] if rank > 2 else [2])
    for offset in (0, "end"):
        case = Case(
            tensors(rank) | {"key_lengths": lengths}, {"causal": True, "query_offset": offset}
        )
        case.check(ask(server, case.document)["outputs"])


def test_what_stands_in_padding_is_not_looked_at(server: Server) -> None:
    case = Case(tensors(2) | {"key_lengths": np.array([3])})
    for names in (("key",), ("value",), ("key", "value")):
        inputs = dict(case.inputs)
        for name in names:
            inputs[name] = inputs[name].copy()
            inputs[name][3:] = np.nan
        case.check(ask(server, Case(inputs).document)["outputs"])


def test_a_row_that_sees_nothing_is_zeros(server: Server) -> None:
    hidden = {"mask": np.array([[True] * 5, [False] * 5, [True] * 5])}
    for extra, rows in ((hidden, [1]), ({"key_lengths": np.array([0])}, [0, 1, 2])):
        for outputs in (("output",), ("output", "weights")):
            case = Case(tensors(2) | extra, outputs=outputs)
            answered = ask(server, case.document)["outputs"]
            case.check(answered)
            for name in outputs:
                assert not as_array(answered[name])[rows].any()


@pytest.mark.parametrize("dtype", FLOATING)
def test_dtype_says_what_numbers_in_lists_are(server: Server, dtype: str) -> None:
    inputs = tensors(3, dtype)
    listed = Case(inputs, dtype=dtype, encoding="lists").document | {"encoding": "base64"}
    answer = ask(server, listed)
    assert answer["outputs"] == ask(server, Case(inputs, dtype=dtype).document)["outputs"]
    exact = "float64" if dtype == "float64" else "float32"
    came = {name: tensor["dtype"] for name, tensor in answer["outputs"].items()}
    assert came == {"output": dtype, "weights": exact, "scores": exact}


def test_numbers_in_lists_are_float32_unless_said(server: Server) -> None:
    assert ask(server, EXAMPLE, encoding="base64")["outputs"]["output"]["dtype"] == "float32"


def test_the_answer_is_encoded_as_the_request_was(server: Server) -> None:
    mixed = {n: as_json(a, "lists") for n, a in tensors(2).items()}
    for name in mixed:
        inputs = mixed | {name: as_json(tensors(2)[name], "base64")}
        first = "base64" if name == "query" else "lists"
        for asked, comes in (({}, first), ({"encoding": None}, first)):
            output = ask(server, {"inputs": inputs}, **asked)["outputs"]["output"]
            assert isinstance(output, dict) == (comes == "base64")
        for encoding in ("lists", "base64"):
            outputs = ask(server, {"inputs": inputs}, encoding=encoding)["outputs"]
            assert all(isinstance(t, dict) == (encoding == "base64") for t in outputs.values())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["output", "weights"]),
        ({"outputs": None}, ["output", "weights"]),
        ({"weights": "full"}, ["output", "weights"]),
        ({"weights": "none"}, ["output"]),
        ({"outputs": ["output"]}, ["output"]),
        ({"outputs": ["weights"]}, ["weights"]),
        ({"outputs": ["scores"]}, ["scores"]),
        ({"outputs": ["scores", "output"]}, ["output", "scores"]),
        ({"outputs": ["output"], "weights": "none"}, ["output"]),
        ({"outputs": ["output", "weights", "scores"]}, ["output", "weights", "scores"]),
    ],
)
def test_what_to_return(server: Server, fields: dict[str, Any], names: list[str]) -> None:
    case = Case(tensors(4), {"causal": True}, outputs=tuple(names))
    answer = ask(server, {k: v for k, v in case.document.items() if k != "outputs"}, **fields)
    assert list(answer["outputs"]) == names
    case.check(answer["outputs"])


def test_timing_is_measured_and_goes_out_as_a_header(server: Server) -> None:
    response = post(server, Case(tensors(4)).document)
    timing = response.json()["timing"]
    assert timing.keys() == {*TIMES, "batch_size", "device", "backend", "flops", "bytes"}
    assert all(isinstance(timing[name], float) and timing[name] >= 0 for name in TIMES)
    assert timing["compute_ms"] > 0
    assert sum(timing[name] for name in TIMES[:3]) <= timing["total_ms"]
    header = dict(re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"]))
    assert {f"{n}_ms": float(t) for n, t in header.items()} == {
        n: round(timing[n], 4) for n in TIMES
    }


@pytest.mark.parametrize("outputs", [("output",), ("weights", "output"), ("scores",)])
def test_flops_and_bytes_are_the_analytic_counts(server: Server, outputs: tuple[str, ...]) -> None:
    B, H, G, L, S, D, E = 2, 4, 2, 3, 5, 8, 6
    mask = np.ones((1, S), bool)
    case = Case(tensors(4, "float16") | {"mask": mask}, dtype="float16", outputs=outputs)
    timing = ask(server, case.document)["timing"]
    assert timing["flops"] == 2 * B * H * L * S * (D + E)
    came = 2 * (B * H * L * D + B * G * S * (D + E)) + S
    gone = {"output": 2 * B * H * L * E, "weights": 4 * B * H * L * S, "scores": 4 * B * H * L * S}
    assert timing["bytes"] == came + sum(gone[name] for name in outputs)


def test_a_layer_counts_too(server: Server) -> None:
    B, L, M, heads, out = 2, 3, 4, 2, 6
    layer = layered("v2", M, out, bias=True)
    x = np.ones((B, L, M), np.float32)
    document = {"inputs": {"x": as_json(x, "base64")}, "layer": layer | {"heads": heads}}
    answer = ask(server, document)
    width = out // heads
    assert answer["timing"]["flops"] == (
        3 * 2 * B * L * M * out + 2 * B * heads * L * L * (width + width)
    )
    assert answer["timing"]["bytes"] == 4 * (
        B * L * M + 3 * (M * out + out) + B * L * out + B * heads * L * L
    )
    assert as_array(answer["outputs"]["output"]).shape == (B, L, out)


def layered(layout: str, width: int, out: int, *, bias: bool = False) -> dict[str, Any]:
    """A layer with random weights."""
    draw = np.random.default_rng(width * out)
    named: dict[str, Any] = {}
    for role in ("query", "key", "value"):
        weight = draw.normal(size=(width, out)).astype(np.float32)
        if layout == "v1":
            named[f"W_{role}"] = as_json(weight, "base64")
        else:
            named[f"W_{role}.weight"] = as_json(weight.T, "base64")
            if bias:
                named[f"W_{role}.bias"] = as_json(weight[0], "base64")
    return {"layout": layout, "tensors": named}


@pytest.mark.parametrize("x_shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize(("heads", "axis"), [(None, ()), (1, (1,)), (2, (2,)), (6, (6,))])
def test_heads_add_an_axis_to_weights_and_scores(
    server: Server, x_shape: tuple[int, ...], heads: int | None, axis: tuple[int, ...]
) -> None:
    x = np.random.default_rng(0).normal(size=x_shape).astype(np.float32)
    document: dict[str, Any] = {
        "inputs": {"x": as_json(x, "base64")},
        "layer": layered("v1", 4, 6) | ({} if heads is None else {"heads": heads}),
        "outputs": ["output", "weights", "scores"],
    }
    outputs = {n: as_array(t) for n, t in ask(server, document)["outputs"].items()}
    assert outputs["output"].shape == (*x_shape[:-1], 6)
    shape = (*x_shape[:-2], *axis, 3, 3)
    assert outputs["weights"].shape == outputs["scores"].shape == shape
    named = document["layer"]["tensors"]
    query, key, value = (x @ as_array(named[f"W_{role}"]) for role in TENSORS)
    lead, count, width = x_shape[:-2], heads or 1, 6 // (heads or 1)
    split = {
        n: np.moveaxis(t.reshape(*lead, 3, count, width), -2, -3).reshape(-1, count, 3, width)
        for n, t in (("query", query), ("key", key), ("value", value))
    }
    merged = np.moveaxis(outputs["output"].reshape(*lead, 3, count, width), -2, -3)
    Case(split, outputs=("output",)).check(
        {"output": as_json(merged.reshape(-1, count, 3, width), "base64")}
    )


def test_words_stand_for_what_json_lacks(server: Server) -> None:
    words = EXAMPLE["inputs"] | {"value": [["Infinity", 2], ["-Infinity", "NaN"]]}
    outputs = ask(server, {"inputs": words})["outputs"]["output"]
    assert outputs == [["NaN", "NaN"], ["NaN", "NaN"]]
    mask = EXAMPLE["inputs"] | {"mask": [[0.0, "-Infinity"], ["-Infinity", "-Infinity"]]}
    answer = ask(server, {"inputs": mask}, outputs=["output", "scores"])
    assert answer["outputs"]["output"] == [[1.0, 2.0], [0.0, 0.0]]
    assert answer["outputs"]["scores"][1] == ["-Infinity", "-Infinity"]


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-40, 1e-50, 1e9, -1e9])
@pytest.mark.parametrize("outputs", [("output",), ("output", "weights", "scores")])
def test_any_scale_gives_numbers(server: Server, scale: float, outputs: tuple[str, ...]) -> None:
    small = {n: np.sign(a) * 2.0**-20 for n, a in tensors(4).items()}
    inputs = {n: a.astype(np.float32) for n, a in small.items()}
    for causal in (False, True):
        case = Case(inputs, {"scale": scale, "causal": causal}, outputs=outputs)
        case.check(ask(server, case.document)["outputs"])


@pytest.mark.parametrize("kind", range(150))
def test_everything_at_once_against_the_reference(server: Server, kind: int) -> None:
    case = random_case(10_000 + kind, 0)
    case.check(ask(server, case.document)["outputs"])


@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_what_is_too_long_for_the_event_loop(server: Server, encoding: str) -> None:
    """Bodies and answers past a MiB take another way through the service."""
    draw = np.random.default_rng(1)
    inputs = {n: draw.normal(size=(640, 600)).astype(np.float32) for n in ("query", "key", "value")}
    case = Case(inputs, {"causal": True}, outputs=("output", "weights"), encoding=encoding)
    case.check(ask(server, case.document)["outputs"])


# what is refused


def test_an_unknown_variant_is_told_which_there_are(server: Server) -> None:
    known = [v["variant"] for v in server.http.get("/v1/variants").json()["variants"]]
    assert "softmax" in known
    for method, path in (("POST", "/v1/attention/sofmax"), ("GET", "/v1/variants/sofmax")):
        problem = refused(server.http.request(method, path, json=EXAMPLE), 404)
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
def test_paths_and_methods_that_are_not(
    server: Server, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path, json=EXAMPLE)
    refused(response, status)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/jsonx"},
        {"Content-Type": "json"},
        {"Content-Type": ""},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/attention/softmax", "/v1/convert"])
def test_media_types_without_a_codec(server: Server, path: str, headers: dict[str, str]) -> None:
    body = json.dumps(EXAMPLE).encode()
    problem = refused(server.http.post(path, content=body, headers=headers), 415)
    assert "application/json" in problem["detail"] or "gzip" in problem["detail"]


@pytest.mark.parametrize(
    "media_type", ["application/json", "APPLICATION/JSON", "application/json; charset=utf-8", None]
)
def test_media_types_of_json(server: Server, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    body = json.dumps(EXAMPLE).encode()
    assert server.http.post("/v1/attention/softmax", content=body, headers=headers).is_success


@pytest.mark.parametrize("path", ["/v1/attention/softmax", "/v1/convert"])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_too_long_a_body_is_refused_before_it_is_sent(
    server: Server, path: str, expect: str
) -> None:
    limit = server.app.state.settings.max_body_bytes
    with socket.create_connection(server.address, PATIENCE) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\n{expect}Content-Length: {10**12}\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert f"{10**12} bytes; at most {limit}" in answer


@pytest.mark.parametrize("path", ["/v1/attention/softmax", "/v1/convert"])
def test_too_long_a_body_is_refused_while_it_grows(serve: Callable[..., Server], path: str) -> None:
    server = serve(max_body_bytes=1000)
    with socket.create_connection(server.address, PATIENCE) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(11):
            connection.sendall(b"64\r\n" + b" " * 100 + b"\r\n")
        answer = connection.recv(65536).decode()  # the last chunk is never sent
    assert answer.startswith("HTTP/1.1 413 ")
    assert "more than 1000 bytes" in answer
    exact = json.dumps(EXAMPLE).encode()
    assert post(server, exact.ljust(1000)).is_success
    problem = refused(post(server, exact.ljust(1001)), 413)
    assert "1001" in problem["detail"]
    assert problem["limit"] == 1000
    assert server.http.post("/v1/attention/softmax", content=iter([exact, b" " * 500])).is_success
    refused(server.http.post("/v1/attention/softmax", content=iter([exact, b" " * 1000])), 413)


def test_weights_that_never_fit_are_refused_and_told_what_would(
    server: Server, serve: Callable[..., Server]
) -> None:
    long = as_json(np.zeros((20_000, 1), np.float32), "base64")
    document = {"inputs": dict.fromkeys(("query", "key", "value"), long)}
    problem = refused(post(server, document), 413)
    assert str(20_000 * 20_000 * 4 + 20_000 * 4) in problem["detail"]
    assert '"weights": "none"' in problem["detail"]
    small = serve(max_answer_bytes=64 * 64 * 4)
    case = Case({n: np.ones((64, 1), np.float32) for n in ("query", "key", "value")})
    for outputs, status in ((["output", "weights"], 413), (["weights"], 200), (["output"], 200)):
        assert post(small, case.document | {"outputs": outputs}).status_code == status
    tiny = serve(max_queue_bytes=100)
    assert ask(tiny, EXAMPLE)["timing"]["bytes"] == 80
    assert "100" in refused(post(tiny, EXAMPLE | {"dtype": "float64"}), 413)["detail"]


def test_more_scores_than_allowed_are_refused(serve: Callable[..., Server]) -> None:
    server = serve(max_scores=2 * 4 * 3 * 5)
    case = Case(tensors(4), outputs=("output",))
    assert post(server, case.document).is_success
    more = Case(case.inputs | {"query": np.zeros((2, 4, 4, 8), "f4")}, outputs=("output",))
    assert str(2 * 4 * 4 * 5) in refused(post(server, more.document), 413)["detail"]


def test_when_too_much_waits_a_retry_makes_sense(serve: Callable[..., Server]) -> None:
    server = serve(max_queue_bytes=200)
    with ThreadPoolExecutor(2) as pool:
        with server.engine.hold():
            waiting = [
                pool.submit(httpx.post, f"{server.url}/v1/attention/softmax", json=EXAMPLE)
                for _ in range(2)
            ]
            server.await_waiting(2)
            response = post(server, EXAMPLE)
            refused(response, 503)
            assert int(response.headers["retry-after"]) >= 1
        assert all(future.result().is_success for future in waiting)
    assert post(server, EXAMPLE).is_success


def test_who_leaves_gives_the_place_back(server: Server) -> None:
    body = json.dumps(EXAMPLE).encode()
    head = "POST /v1/attention/softmax HTTP/1.1\r\nHost: here\r\n"
    with server.engine.hold():
        with socket.create_connection(server.address, PATIENCE) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.await_waiting(1)
        server.await_waiting(0)
    with socket.create_connection(server.address, PATIENCE) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:20])
    assert post(server, EXAMPLE).is_success


def test_declared_shapes_cost_nothing(process: Process) -> None:
    """A tensor that says it has 2**60 elements is answered without room made for them."""
    status = Path(f"/proc/{process.popen.pid}/status")
    if not status.exists():
        pytest.skip("/proc says how much memory a process took, and is not here")

    def most() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1])

    example = Case(tensors(2)).document
    layer = {"inputs": {"x": EYE}, "layer": layered("v1", 2, 2)}
    convert = {"from": "v1", "to": "v2", "tensors": layer["layer"]["tensors"]}
    with httpx.Client(base_url=process.url, timeout=PATIENCE) as http:
        assert http.post("/v1/attention/softmax", json=example).is_success
        assert http.post("/v1/attention/softmax", json=layer).is_success
        assert http.post("/v1/convert", json=convert).is_success
        before = most()
        for shape in ([2**60], [2**30, 2**30], [2**20] * 3, [2**62] * 8, [2**62, 4, 0], [0, 2**60]):
            huge = {"dtype": "float32", "shape": shape, "data": ""}
            for path, document, names in (
                ("attention/softmax", example, [["inputs", n] for n in ("query", "key", "value")]),
                ("attention/softmax", layer, [["inputs", "x"], ["layer", "tensors", "W_key"]]),
                ("convert", convert, [["tensors", "W_query"]]),
            ):
                for *path_to, name in names:
                    changed = copy.deepcopy(document)
                    node = changed
                    for step in path_to:
                        node = node[step]
                    node[name] = huge
                    refused(http.post(f"/v1/{path}", json=changed), 422, changed)
        assert most() - before < 16 << 10


# what is malformed, in hundreds of ways


def valid(name: str) -> dict[str, Any]:
    """Requests to break; each is answered as it is."""
    draw = np.random.default_rng(7)
    mask = np.where(draw.random((4, 1, 5)) < 0.7, 0.5, -np.inf).astype(np.float32)
    document: dict[str, Any]
    if name == "lists":
        document = Case(tensors(2), {"causal": True, "scale": 0.5}, encoding="lists").document
        document["inputs"]["mask"] = [[True, True, False, True, True]] * 3
        document["inputs"]["key_lengths"] = [4]
    elif name == "base64":
        parameters = {"window": [2, None], "query_offset": "end", "dropout": 0.1, "seed": 3}
        more = {"mask": mask, "key_lengths": np.array([3, 5])}
        document = Case(tensors(4) | more, parameters).document
    elif name == "x":
        document = {
            "inputs": {"x": [[[1, 2, 3, 4.5], [0, -1, 0, 2]]]},
            "layer": layered("v1", 4, 6) | {"heads": 2},
            "parameters": {"softcap": 5},
        }
    else:
        embeddings = {
            n: as_json(np.ones((2, 4), "f4"), "base64") for n in ("query", "key", "value")
        }
        document = {"inputs": embeddings, "layer": layered("v2", 4, 6, bias=True)}
    return document


DOCUMENTS = ("lists", "base64", "x", "embeddings")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Harm = Callable[[Draw, dict[str, Any]], "dict[str, Any] | bytes | None"]
HARMS: dict[str, tuple[tuple[str, ...], Harm]] = {}


def harm(*documents: str) -> Callable[[Harm], Harm]:
    """Makes a way to break these documents (None: all) known."""

    def add(function: Harm) -> Harm:
        HARMS[function.__name__] = (documents or DOCUMENTS, function)
        return function

    return add


ONE = st.sampled_from
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
NOT_A_TENSOR: list[Any] = [
    None, "", "x", {}, {"a": 1}, [None], [[1, None]], [[1, "x"]], [[1, [2]]], [[1], 2], [[], [1]],
    [{}], [[1, True]], [[0.5, False]], True, [[True]], 5, [1, 2], [], [[]], [[[]]],
]  # fmt: skip


def tensors_of(document: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where the tensors stand that a request cannot do without."""
    groups = [document["inputs"], document.get("layer", {}).get("tensors", {})]
    return [(g, n) for g in groups for n in g if n not in ("mask", "key_lengths")]


@harm()
def a_tensor_is_left_out(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE([t for t in tensors_of(document) if not t[1].endswith("bias")]))
    del group[name]


@harm()
def a_tensor_has_another_name(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE([t for t in tensors_of(document) if not t[1].endswith("bias")]))
    group[name + draw(TEXT) + "~/"] = group.pop(name)


@harm()
def a_tensor_nobody_knows(draw: Draw, document: dict[str, Any]) -> None:
    group = draw(ONE(tensors_of(document)))[0]
    group[draw(TEXT.filter(lambda n: n not in group and n != "mask"))] = EYE


@harm()
def a_tensor_is_something_else(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    junk = draw(ONE(NOT_A_TENSOR))
    group[name] = 5 if name.endswith("bias") and junk == [1, 2] else junk


@harm("lists", "x")
def a_row_is_longer(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE([n for n in document["inputs"] if n != "key_lengths"]))
    row = document["inputs"][name]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row.append(row[0])


@harm("lists")
def a_number_is_something_else(draw: Draw, document: dict[str, Any]) -> None:
    row = document["inputs"][draw(ONE(TENSORS))]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row[draw(ONE(range(len(row))))] = draw(ONE([None, "", "nan", "1", {}, [], [1], True, False]))


@harm("lists", "x")
def a_number_is_too_large(draw: Draw, document: dict[str, Any]) -> None:
    row = document["inputs"][draw(ONE([n for n in document["inputs"] if n in (*TENSORS, "x")]))]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row[0] = draw(ONE([1e39, -1e39, 1e308]))


@harm("base64")
def an_axis_is_longer(draw: Draw, document: dict[str, Any]) -> None:
    name, axis = draw(
        ONE([("query", 0), ("query", 1), ("query", 3)])
        | st.tuples(ONE(["key", "value"]), ONE([0, 1, 2]))
    )
    grown(document["inputs"], name, axis)


@harm("x", "embeddings")
def a_layer_does_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    inputs, weights = document["inputs"], document["layer"]["tensors"]
    group, name = draw(ONE([(g, n) for g in (inputs, weights) for n in g]))
    if group is inputs and "x" in inputs:
        inputs["x"] = [[[1, 2, 3, 4, 5]]]
    else:
        into = -1 if group is inputs or document["layer"]["layout"] == "v2" else 0
        grown(group, name, 0 if name.endswith("bias") else into)


def grown(group: dict[str, Any], name: str, axis: int) -> None:
    array = as_array(group[name])
    more = np.repeat(array, 2, axis)
    keep = [slice(None)] * array.ndim
    keep[axis] = slice(array.shape[axis] + 1)
    group[name] = as_json(more[tuple(keep)], "base64")


@harm()
def an_axis_is_empty(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    array = as_array(group[name])
    shape = list(array.shape)
    shape[draw(ONE(range(len(shape))))] = 0
    group[name] = as_json(np.zeros(shape, "f4"), draw(ONE(["lists", "base64"])))


@harm()
def too_many_axes(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    array = as_array(group[name]).astype(np.float32)
    more = array.reshape((1,) * draw(st.integers(5, 8)) + array.shape)
    group[name] = as_json(more, draw(ONE(["lists", "base64"])))


@harm("base64", "embeddings")
def another_rank_than_the_query(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(["key", "value"]))
    array = as_array(document["inputs"][name])
    document["inputs"][name] = as_json(draw(ONE([array[0], array[None]])), "base64")


@harm("base64", "embeddings")
def dtypes_are_mixed(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    other = draw(ONE(["float64", "float16", "bfloat16", "int64", "bool"]))
    group[name] = as_json(as_array(group[name]).astype(DTYPES[other]), "base64")


@harm("base64", "embeddings")
def base64_is_damaged(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    data = group[name]["data"]
    at = draw(st.integers(0, len(data) - 1))
    ways = {
        "cut": data[:at],
        "more": data + data[: 4 + at],
        "odd": data[:at] + draw(ONE("*-_ \n.ä€")) + data[at + 1 :],
        "none": draw(ONE([None, 5, [], {}, True])),
    }
    group[name]["data"] = ways[draw(ONE(list(ways)))]


@harm("base64", "embeddings")
def a_declaration_is_wrong(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    tensor = group[name]
    key, bad = draw(
        st.tuples(st.just("dtype"), ONE(["int8", "float", "<f4", "", None, 4, ["float32"], {}]))
        | st.tuples(
            st.just("shape"),
            ONE(
                [None, 4, "4", {}, [-1], [2**63], [2**60], [2.0], [True], ["2"], [None], [[2]], []]
            ),
        )
        | st.tuples(TEXT.filter(lambda n: n not in tensor), st.none())
    )
    tensor[key] = bad


@harm("base64", "embeddings")
def a_declaration_is_incomplete(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    del group[name][draw(ONE(["dtype", "shape", "data"]))]


@harm("lists", "base64")
def a_mask_does_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    masks = [
        [[0, 1, 0, 1, 0]], [[1, 1, 1, 1, 1]], 1, [True, False], [[True] * 6], [[True] * 5] * 2,
        [[[[[True]]]]], [["x"]], [None], None, "true", [[]], [], {}, [[1, True, 0, 0, 0]],
        as_json(np.zeros((1, 5), np.int64), "base64"), as_json(np.zeros((7, 5), "f4"), "base64"),
    ]  # fmt: skip
    document["inputs"]["mask"] = draw(ONE(masks))


@harm("lists", "base64")
def key_lengths_do_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    count = 1 if document["inputs"]["key_lengths"] == [4] else 2
    number = draw(ONE([-1, 6, 2**62, 2**63, 1.5, "NaN", "Infinity", True, None, "3", [3], 1e300]))
    lengths = [[number] * count, [3] * (count + 1), 3, [], "3", None, {}, [[3] * count]]
    lengths.append(as_json(np.full(count, 3.0, "f4"), "base64"))
    lengths.append(as_json(np.full(count, -1), "base64"))
    document["inputs"]["key_lengths"] = draw(ONE(lengths))


BAD_PARAMETERS: dict[str, list[Any]] = {
    "causal": [None, 0, 1, "true", [], {}],
    "query_offset": [None, 1.5, "start", "", True, [0], {}, 2**31, -(2**31) - 1, 2**63],
    "scale": ["1", True, [], {}, "NaN", "Infinity", 1e10, -1e300],
    "softcap": [0, -1, 1e10, "1", False, [], {}, "Infinity"],
    "window": [1, "1", [], [1], [1, 2, 3], [-1, 1], [1, -1], [1.5, 1], ["1", 1], [True, 1], {}],
    "dropout": [None, 1, 1.0, -0.1, "0", True, [], {}, 2],
    "seed": [None, -1, 1.5, "1", True, [], {}],
}  # fmt: skip


@harm()
def a_parameter_is_wrong(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_PARAMETERS)))
    document.setdefault("parameters", {})[name] = draw(ONE(BAD_PARAMETERS[name]))


@harm()
def a_parameter_nobody_knows(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(
        TEXT.filter(lambda n: n not in BAD_PARAMETERS) | ONE(["Causal", "is_causal", "a/b~"])
    )
    document.setdefault("parameters", {})[name] = draw(ONE([None, 1, True, [], {}]))


BAD_FIELDS: dict[str, list[Any]] = {
    "parameters": [None, [], 1, "causal", True, [["causal", True]]],
    "outputs": [[], "output", ["nothing"], [1], [None], [["output"]], {}, 1, True, ["output", ""]],
    "weights": ["some", "", "Full", None, 1, True, [], {}, {"rows": "all"}, {"nothing": 1}],
    "dtype": ["float", "int64", "bool", "", None, 32, [], {}, True],
    "encoding": ["list", "", "safetensors", 64, [], {}, True],
    "layer": [1, True, [], 1.5],
    "inputs": [None, [], 1, "query", True, {}, [EYE]],
}


@harm()
def a_field_is_wrong(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_FIELDS)))
    document[name] = draw(ONE(BAD_FIELDS[name]))


@harm()
def a_field_nobody_knows(draw: Draw, document: dict[str, Any]) -> None:
    known = (*BAD_FIELDS, "inputs")
    name = draw(TEXT.filter(lambda n: n not in known) | ONE(["Inputs", "query", "a/b~c", ""]))
    document[name] = draw(ONE([None, 1, True, [], {}, EYE]))


@harm("lists", "base64")
def weights_asked_for_and_not(draw: Draw, document: dict[str, Any]) -> None:
    document |= {"outputs": ["output", "weights"], "weights": "none"}


BAD_LAYER: dict[str, list[Any]] = {
    "layout": ["v3", "", "V1", None, 1, [], {}, True],
    "heads": [0, -1, 4, 5, 7, 65537, 2**62, True, "2", 1.0, [2], {}],
    "tensors": [None, [], 1, "W", {}, True],
}


@harm("x", "embeddings")
def a_layer_is_wrong(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_LAYER)))
    document["layer"][name] = draw(ONE(BAD_LAYER[name]))


@harm("x", "embeddings")
def a_layer_has_more_or_less(draw: Draw, document: dict[str, Any]) -> None:
    layer = document["layer"]
    if draw(st.booleans()):
        del layer[draw(ONE(["layout", "tensors"]))]
    else:
        layer[draw(TEXT.filter(lambda n: n not in ("layout", "tensors", "heads")))] = None


@harm("x")
def x_beside_what_it_stands_for(draw: Draw, document: dict[str, Any]) -> None:
    inputs = document["inputs"]
    inputs[draw(ONE(TENSORS))] = inputs["x"]


@harm("lists")
def x_without_a_layer(draw: Draw, document: dict[str, Any]) -> None:
    inputs = document["inputs"]
    inputs["x"] = inputs["query"] if draw(st.booleans()) else inputs.pop("query")


@harm("x")
def a_projection_is_spelled_twice(draw: Draw, document: dict[str, Any]) -> None:
    weights = document["layer"]["tensors"]
    name = draw(ONE(["W_key", "W_value"]))
    weights[f"{name}s"] = weights[name]


@harm()
def the_body_is_cut(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    return body[: draw(st.integers(0, len(body) - 1))]


@harm()
def the_body_goes_on(draw: Draw, document: dict[str, Any]) -> bytes:
    more: bytes = draw(ONE([b"}", b"x", b"{}", b"\0", b",", b"\xff"]))
    return json.dumps(document).encode() + more


@harm()
def the_body_is_no_object(draw: Draw, document: dict[str, Any]) -> bytes:
    return json.dumps(draw(ONE([[document], [], None, 1, "x", json.dumps(document)]))).encode()


@harm()
def a_name_comes_twice(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document)
    found: re.Match[str] = draw(ONE(list(re.finditer(r'"\w+": ', body))))
    return f"{body[: found.start()]}{found[0]}0, {body[found.start() :]}".encode()


@harm()
def some_bytes_are_no_text(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    at = draw(st.integers(0, len(body) - 1))
    odd: bytes = draw(ONE([b"\xff", b"\x80", b"\xc3(", b"\xed\xa0\x80"]))
    return body[:at] + odd + body[at + 1 :]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_about_to_be_broken_is_whole(server: Server, name: str) -> None:
    ask(server, valid(name))


@pytest.mark.parametrize("name", HARMS)
def test_what_is_malformed_is_refused_and_says_why(server: Server, name: str) -> None:
    documents, harmed = HARMS[name]

    @settings(max_examples=25)
    @given(st.data(), st.sampled_from(documents))
    def break_it(data: st.DataObject, kind: str) -> None:
        document = valid(kind)
        sent = harmed(data.draw, document)
        sent = document if sent is None else sent
        response = post(server, sent)
        if isinstance(sent, bytes):
            refused(response, response.status_code if response.status_code == 422 else 400)
        else:
            # a number past 64 bits is not parsed; a layer's name that is not there is not found
            unread = response.status_code == 400 and re.search(r"\d{19}", json.dumps(sent))
            refused(response, 400 if unread else 422, sent)

    break_it()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["NaN", "Infinity", "v1", "v2", "output", "float64", "end", "none", "AAAA"])
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.data())
def test_anything_anywhere_is_answered_or_refused(server: Server, data: st.DataObject) -> None:
    document = valid(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 2))):
        node: Any = document
        while True:
            at = data.draw(
                st.sampled_from(list(node) if isinstance(node, dict) else range(len(node)))
            )
            if not (isinstance(node[at], dict | list) and node[at]) or data.draw(st.booleans()):
                break
            node = node[at]
        node[at] = data.draw(ANYTHING)
    response = post(server, document)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413, 422)
        refused(response, response.status_code, document)


def test_after_all_that_it_answers_as_before(server: Server) -> None:
    done = threading.Event()
    server.app.state.engine._loop.call_soon_threadsafe(done.set)
    assert done.wait(PATIENCE)
    assert server.waiting == 0
    assert server.http.get("/livez").json() == server.http.get("/readyz").json() == {"status": "ok"}
    for name in DOCUMENTS:
        ask(server, valid(name))
