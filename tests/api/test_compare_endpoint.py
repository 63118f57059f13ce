"""Comparisons over HTTP: same report as a local run, other requests in between, disconnects."""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np
import pytest

from qkv.jobs.job import Job
from qkv.tensors import RawTensor
from qkv.wire import safetensors
from qkv.wire.message import Message
from support.compare_requests import (
    COMPARE,
    INPUTS,
    X,
    assert_same_report,
    compare,
    post,
    random_inputs,
    variant_entry,
)
from support.known_requests import as_json, assert_problem
from support.processes import wait_until
from support.service import Server


@pytest.mark.parametrize("per_head", [False, True])
def test_service_and_local_run_give_the_same_report(server: Server, per_head: bool) -> None:
    inputs = random_inputs()
    fields = {
        "variants": ["linear", variant_entry("taylor", causal=True)], "repeats": 2,
        "per_head": per_head,
    }  # fmt: skip
    for encoding in ("lists", "base64"):
        body = {"inputs": {n: as_json(a, encoding) for n, a in inputs.items()}, **fields}
        response = post(server, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        assert "x-request-id" in response.headers
        assert_same_report(response.json(), compare(inputs, **fields))
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    file = b"".join(safetensors.encode(Message(fields, raw), "inputs"))
    headers = {"Content-Type": safetensors.MEDIA_TYPE}
    response = server.http.post(COMPARE, content=file, headers=headers)
    assert_same_report(response.json(), compare(inputs, **fields))
    assert set(response.headers["server-timing"].split(";dur=")) >= {"queue"}
    timing = response.json()["timing"]
    assert timing["runs"] == 3 + 3 * 2 + 1 + 3  # peaks, times, the reference, rows of weights
    assert timing["device"] == "cpu"
    assert timing["total_ms"] >= timing["compute_ms"] > 0


def test_most_heads_are_compared(server: Server) -> None:
    """The figures of so many heads are built and encoded outside the event loop."""
    inputs = {"value": RawTensor.from_numpy(np.ones((1, 2048, 1, 1), np.float32))}
    fields = {"variants": ["mean"], "anchor": "mean", "per_head": True, "repeats": 1}
    file = b"".join(safetensors.encode(Message(fields, inputs), "inputs"))
    headers = {"Content-Type": safetensors.MEDIA_TYPE}
    response = server.http.post(COMPARE, content=file, headers=headers)
    assert response.status_code == 200, response.text
    (entry,) = response.json()["variants"]
    assert len(entry["heads"]) == 2048
    assert all(head == entry["heads"][0] for head in entry["heads"])
    assert entry["heads"][0]["weights"] == entry["weights"]
    right = {"relative_error": 0.0, "largest_error": 0.0, "cosine": 1.0}
    assert entry["heads"][0]["output"] == right


def test_optional_inputs_go_to_variants_that_take_them(server: Server) -> None:
    half = np.random.default_rng(0).normal(size=(2, 3)).tolist()
    inputs = INPUTS | {"key_projection": half, "value_projection": half}
    response = post(server, {"inputs": inputs, "variants": ["linformer", "mean"]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "accept", ["application/json", "*/*", "application/*", "text/html, */*;q=0.1"]
)
def test_response_is_json_only(server: Server, accept: str) -> None:
    body = {"inputs": INPUTS, "variants": ["linear"], "repeats": 1}
    assert post(server, body, headers={"Accept": accept}).status_code == 200
    for other in ("text/html", safetensors.MEDIA_TYPE, "application/json;q=0"):
        assert_problem(post(server, body, headers={"Accept": other}), 406)


def slow(server: Server) -> bytes:
    """A request of 1700 runs, which takes seconds."""
    inputs = dict.fromkeys(INPUTS, X * 200)
    body = json.dumps({"inputs": inputs, "variants": ["softmax"] * 16, "repeats": 100}).encode()
    head = f"POST {COMPARE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Every submitted job."""
    jobs: list[Job] = []
    submit = server.engine.submit

    def counting(job: Job, **how: Any) -> Any:
        jobs.append(job)
        return submit(job, **how)

    monkeypatch.setattr(server.engine, "submit", counting)
    return jobs


def test_client_disconnect_ends_the_comparison(server: Server, counted: list[Job]) -> None:
    with socket.create_connection(server.address) as client:
        client.sendall(slow(server))
        with server.hold():
            wait_until(lambda: server.queued_count == 1)
            client.close()
            wait_until(lambda: server.queued_count == 0)
        seen = len(counted)
        assert post(server, {"inputs": INPUTS, "variants": ["mean"], "repeats": 1}).is_success
    own = 2 + 2 + 1 + 2
    assert len(counted) == seen + own


def test_other_requests_run_in_between(server: Server, counted: list[Job]) -> None:
    """Each run is queued by itself, so that other requests run in between."""
    with socket.create_connection(server.address) as client:
        client.sendall(slow(server))
        wait_until(lambda: len(counted) > 5)
        before = len(counted)
        for _ in range(5):
            response = server.http.post("/v1/attention/softmax", json={"inputs": INPUTS})
            assert response.status_code == 200
        assert before <= len(counted) < 17 * 101
    wait_until(lambda: server.queued_count == 0)


def test_deadline_holds_for_each_run(server: Server) -> None:
    body = {"inputs": INPUTS, "variants": ["linear"], "repeats": 1}
    with server.hold():
        late = post(server, body, headers={"X-Request-Timeout": "0.05"})
    assert_problem(late, 504)
    assert_problem(post(server, body, headers={"X-Request-Timeout": "soon"}), 400)
    assert post(server, body, headers={"X-Request-Timeout": "30"}).status_code == 200
