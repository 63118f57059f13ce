"""Tests of requests through Ray's proxy to a replica with default settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from qkv import Client, errors
from qkv.attention.catalogue import variants
from support.clients import exact_softmax, numbers
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import PATH, encode_body, encode_request, inputs_for
from support.raw_connection import random_inputs as raw_inputs
from support.ray_replicas import raw_request, read_sample, request_in_progress, shared_replicas
from support.triton_client import (
    infer_inputs,
    raises_inference_error,
    random_inputs,
    triton_client,
)

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

pytestmark = shared_replicas


def test_clients_are_answered_through_the_proxy(ray_url: str) -> None:
    inputs, long = numbers(), np.ones((1, 2, 512, 8), np.float32)
    with Client(ray_url, retries=0) as client:
        run = client.attend("softmax", **inputs)
        np.testing.assert_allclose(run.output, exact_softmax(**inputs), rtol=1e-4, atol=1e-5)
        large = client.attend("softmax", query=long, key=long, value=long)
        np.testing.assert_allclose(large.weights, 1 / 512, rtol=1e-4)
        with pytest.raises(errors.InvalidContent, match="key has"):
            client.attend("softmax", **inputs | {"key": inputs["key"][..., :1]})
        with pytest.raises(errors.NotFound):
            client.attend("nothing", **inputs)
        with client.sweep(["softmax"], [16, 32], repeats=2, progress=False) as sweep:
            assert [cell.length for cell in sweep] == [16, 32]


def test_triton_client_is_answered_and_unloads_no_model(ray_url: str) -> None:
    with triton_client(ray_url) as client:
        assert client.is_server_ready()
        arrays = random_inputs()
        output = client.infer("softmax", infer_inputs(arrays)).as_numpy("output")
        np.testing.assert_allclose(output, exact_softmax(**arrays), rtol=1e-4, atol=1e-5)
        with raises_inference_error("not allowed under Ray Serve"):
            client.unload_model("softmax")
        assert client.is_model_ready("softmax")


def test_outputs_have_the_bits_of_the_service_with_as_many_threads(ray_url: str, url: str) -> None:
    with Client(ray_url, retries=0) as ray_client, Client(url, retries=0) as client:
        calls: list[tuple[str, Any]] = [(name, inputs_for(name)) for name in variants()]
        for variant, inputs in [*calls, ("softmax", raw_inputs(0, (1, 2, 513, 32)))]:
            one, other = (c.attend(variant, **inputs).outputs for c in (ray_client, client))
            assert one.keys() == other.keys()
            assert all(one[name].tobytes() == other[name].tobytes() for name in one), variant


def log_lines(cluster: RayCluster) -> list[dict[str, Any]]:
    """Returns the lines of all replicas' request logs."""
    paths = cluster.folder.glob("session_latest/logs/worker-*.out")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.startswith('{"time"')]


def test_response_has_one_id_which_is_that_of_the_log(ray_url: str, cluster: RayCluster) -> None:
    for headers in ({}, {"x-request-id": "chosen-by-the-client"}):
        for path, status in (("/readyz", 200), ("/nothing", 404)):
            response = httpx.get(ray_url + path, headers=headers)
            assert response.status_code == status
            (id,) = response.headers.get_list("x-request-id")
            assert id == headers.get("x-request-id", id)
            wait_until(
                lambda: any(  # is called before the loop goes on
                    (line["request_id"], line["path"]) == (id, path)  # noqa: B023
                    for line in log_lines(cluster)
                )
            )


def test_log_has_an_id_of_its_own_if_that_of_the_client_is_not_allowed(
    ray_url: str, cluster: RayCluster
) -> None:
    path = "/an-id-with-a-space"
    response = httpx.get(ray_url + path, headers={"x-request-id": "two words"})
    assert response.headers.get_list("x-request-id") == ["two words"]
    found: list[str] = []

    def is_logged() -> bool:
        found[:] = (line["request_id"] for line in log_lines(cluster) if line["path"] == path)
        return bool(found)

    wait_until(is_logged)
    assert len(found) == 1
    assert " " not in found[0]


def test_page_and_its_files_are_served_through_the_proxy(ray_url: str) -> None:
    with httpx.Client(base_url=ray_url, timeout=TIMEOUT_S) as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        scripts = re.findall(r'src="([^"]+\.js)"', page.text)
        assert scripts
        for script in scripts:
            response = http.get(script if script.startswith("/") else f"/{script}")
            assert response.status_code == 200
            assert "javascript" in response.headers["content-type"]
        assert http.get("/openapi.json").json()["info"]["title"] == "qkv"


def test_body_above_the_limit_is_rejected_before_it_is_read(
    ray_url: str, cluster: RayCluster
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-length: {1 << 40}\r\n\r\n"
    with raw_request(cluster, head.encode()) as client:
        assert client.status() == 413
        assert "bytes" in json.loads(client.rest())["error"]


def test_client_that_disconnects_during_its_body_is_counted_as_left(
    ray_url: str, cluster: RayCluster
) -> None:
    request = encode_request(*encode_body(raw_inputs(0)))
    left = 'qkv_requests_total{outcome="client-disconnected",variant="softmax"}'
    before = read_sample(ray_url, left)
    for _ in range(10):  # Ray tells the replica in several ways, in any order
        with request_in_progress(cluster, request):
            pass
        wait_until(lambda: read_sample(ray_url, "qkv_requests_in_progress") == 0)
    assert read_sample(ray_url, left) == before + 10


HOSTILE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "nested": lambda: ("/v1/attention/softmax", b"[" * 100_000),
    "not JSON": lambda: ("/v1/attention/softmax", b'{"inputs": NaN'),
    "too many scores": lambda: (PATH, large_scores()),
}


def large_scores() -> bytes:
    """Returns a body without data, whose shapes need more scores than are allowed."""
    shape = [1, 1, 1 << 18, 1]
    inputs = [
        {"name": name, "shape": shape, "datatype": "FP32", "data": []}
        for name in ("query", "key", "value")
    ]
    return json.dumps({"inputs": inputs}).encode()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_body_gets_the_response_of_the_service(
    ray_url: str, url: str, hostile: str
) -> None:
    path, body = HOSTILE[hostile]()
    headers = {"content-type": "application/json", "x-request-id": "same"}
    ours, theirs = (httpx.post(u + path, content=body, headers=headers) for u in (url, ray_url))
    assert 400 <= ours.status_code < 500
    assert (theirs.status_code, theirs.json()) == (ours.status_code, ours.json())


def test_head_of_any_size_is_accepted(ray_url: str) -> None:
    headers = {"x-large": "a" * (1 << 20)}
    assert httpx.get(f"{ray_url}/livez", headers=headers).status_code == 200
