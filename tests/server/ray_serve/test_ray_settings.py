"""Tests of replicas whose settings change, and of limits and API keys through Ray's proxy."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from qkv import Client, errors
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import PATH, RawClient, encode_body, encode_request, random_inputs
from support.ray_replicas import (
    raw_request,
    read_sample,
    replica_actors,
    replica_states,
    request_in_progress,
    run_replicas,
    shared_replicas,
)

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

pytestmark = shared_replicas

KEY: Final = "right-0123456789"
AUTHORIZATION: Final = f"Authorization: Bearer {KEY}"
LONG: Final = (1, 4, 16384, 4)  # two seconds of one thread
SHORT: Final = (1, 2, 1024, 16)  # too large for the event loop: it waits for the device
READ_TIMEOUT_S: Final = 0.2
SETTINGS: Final[dict[str, Any]] = {
    "api_keys": KEY,
    "max_queue": 2,
    "read_timeout_s": READ_TIMEOUT_S,
}


def test_replica_that_a_setting_replaces_finishes_its_requests(
    ray_url: str, cluster: RayCluster
) -> None:
    request = encode_request(*encode_body(random_inputs(0)))
    (before,) = replica_actors()
    with request_in_progress(cluster, request) as client, ThreadPoolExecutor(1) as pool:
        update = pool.submit(run_replicas, cluster, 1, **SETTINGS)
        wait_until(lambda: "STOPPING" in replica_states())
        client.send(request[-1:])
        assert client.status() == 200
        update.result(TIMEOUT_S)
    wait_until(lambda: len(replica_actors() - {before}) == 1)


@pytest.fixture(scope="module")
def limited_url(cluster: RayCluster) -> str:
    """Returns the URL of the proxy in front of one replica with small limits and a key."""
    run_replicas(cluster, 1, **SETTINGS)
    return cluster.url


@pytest.fixture
def long_requests(cluster: RayCluster, limited_url: str) -> Iterator[list[RawClient]]:
    """Returns the clients of one long request that runs, and of one that is queued."""
    with ExitStack() as stack:
        clients = []
        for count in (1, 2):
            clients.append(stack.enter_context(raw_request(cluster, run_request(LONG))))
            wait_until(lambda: sample(limited_url, "qkv_requests_in_progress") == count)  # noqa: B023
        wait_until(lambda: sample(limited_url, "qkv_queue_depth") == 1)
        yield clients
    wait_until(lambda: sample(limited_url, "qkv_requests_in_progress") == 0)


def run_request(shape: tuple[int, ...], *lines: str) -> bytes:
    """Returns a request to softmax with the key."""
    return encode_request(*encode_body(random_inputs(0, shape)), PATH, AUTHORIZATION, *lines)


def sample(url: str, name: str) -> float:
    return read_sample(url, name, authorization=f"Bearer {KEY}")


def test_request_without_a_key_is_rejected_before_its_body_is_read(
    limited_url: str, cluster: RayCluster
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-length: 100\r\n\r\n"
    with raw_request(cluster, head.encode()) as client:
        assert client.status() == 401


def test_paths_of_ray_need_no_key(limited_url: str) -> None:
    assert httpx.get(f"{limited_url}/-/healthz").text == "success"
    assert httpx.get(f"{limited_url}/-/routes").json() == {"/": "qkv"}
    for path in ("/metrics", "/v1/variants", "/openapi.json"):
        assert httpx.get(limited_url + path).status_code == 401
    inputs: Any = random_inputs(0)
    with Client(limited_url, api_key=KEY, retries=0) as client:
        assert client.attend("softmax", **inputs).output.shape == inputs["value"].shape
    with Client(limited_url, api_key="wrong") as client, pytest.raises(errors.Unauthorized):
        client.attend("softmax", **inputs)


def test_deadline_passes_in_the_queue_of_the_replica(
    cluster: RayCluster, long_requests: list[RawClient]
) -> None:
    with raw_request(cluster, run_request(SHORT, "X-Request-Timeout: 0.01")) as late:
        assert late.status() == 503  # below /v2
        assert "deadline" in json.loads(late.rest())["error"]


def test_disconnected_client_cancels_its_queued_job(
    limited_url: str, long_requests: list[RawClient]
) -> None:
    names = [
        f'qkv_requests_total{{outcome="{o}",variant="softmax"}}'
        for o in ("ok", "client-disconnected", "internal")
    ]
    before = [sample(limited_url, name) for name in names]
    running, queued = long_requests
    queued.socket.close()
    assert running.status() == 200
    wait_until(lambda: sample(limited_url, "qkv_requests_in_progress") == 0)
    after = [sample(limited_url, name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1, 0]


def test_request_above_a_limit_of_the_queue_gets_503(
    cluster: RayCluster, long_requests: list[RawClient]
) -> None:
    with ExitStack() as stack:
        more = [stack.enter_context(raw_request(cluster, run_request(LONG))) for _ in range(3)]
        first = first_answered(more + long_requests)
        assert first.status() == 503
        assert 1 <= int(first.header("retry-after")) <= 60
        assert "the limit is 2" in json.loads(first.rest())["error"]


def first_answered(clients: list[RawClient]) -> RawClient:
    """Waits for the first response to one of the clients."""
    ready, _, _ = select.select([client.socket for client in clients], [], [], TIMEOUT_S)
    return next(client for client in clients if client.socket in ready)


def test_slow_body_is_waited_for(limited_url: str, cluster: RayCluster) -> None:
    request = run_request(SHORT)
    with raw_request(cluster, request[:-1]) as client:
        time.sleep(3 * READ_TIMEOUT_S)  # the service itself sends 408 then
        client.send(request[-1:])
        assert client.status() == 200


def test_request_above_the_limit_of_the_proxy_gets_503_without_a_problem(
    limited_url: str, cluster: RayCluster
) -> None:
    options = {"max_ongoing_requests": 1, "max_queued_requests": 1}
    run_replicas(cluster, 1, options=options, **SETTINGS)
    # a request that no replica has yet counts as queued, too: then two of three are rejected
    wait_until(lambda: statuses_beside_a_rejected_request(cluster) == [200, 200])


def statuses_beside_a_rejected_request(cluster: RayCluster) -> list[int]:
    """Sends three requests, of which the proxy rejects one; returns the statuses of the others."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(raw_request(cluster, run_request(SHORT)[:-1])) for _ in range(3)
        ]
        rejected = first_answered(clients)
        assert rejected.status() == 503
        assert rejected.header("retry-after") == "1"
        assert rejected.header("content-type").startswith("text/plain")
        clients.remove(rejected)
        for client in clients:
            client.send(run_request(SHORT)[-1:])
        return [client.status() for client in clients]
