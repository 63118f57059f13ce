"""Tests of replicas that start, die and stop while clients send requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np

from qkv import Client
from support.clients import exact_softmax, numbers
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import encode_body, encode_request, random_inputs
from support.ray_replicas import (
    kill,
    rare_of_ray,
    replica_actors,
    replica_states,
    request_in_progress,
    run_replicas,
)

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

KILLED_AFTER: Final = 30  # responses; with 4 threads, some requests are in the replica then
REQUEST: Final = encode_request(*encode_body(random_inputs(0)))


def test_request_of_a_replica_that_dies_gets_500_without_a_problem(
    ray_url: str, cluster: RayCluster
) -> None:
    (killed,) = replica_actors()
    with request_in_progress(cluster, REQUEST) as client:
        kill(killed)
        assert client.status() == 500
        assert client.header("content-type").startswith("text/plain")
    wait_until(lambda: len(replica_actors() - {killed}) == 1)
    assert httpx.get(f"{ray_url}/readyz", timeout=TIMEOUT_S).status_code == 200


@rare_of_ray
def test_no_call_fails_while_replicas_start_die_and_stop(ray_url: str, cluster: RayCluster) -> None:
    inputs = numbers()
    expected = exact_softmax(**inputs)
    stop, counts = threading.Event(), [0] * 4

    def call(index: int) -> None:
        with Client(ray_url, retries=8) as client:
            while not stop.is_set():
                output = client.attend("softmax", **inputs).output
                np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
                counts[index] += 1

    def wait_for_responses(count: int) -> None:
        least = sum(counts) + count
        wait_until(lambda: sum(counts) >= least or any(f.done() for f in calls))

    with ThreadPoolExecutor(4) as pool:
        calls: list[Any] = [pool.submit(call, index) for index in range(4)]
        try:
            wait_for_responses(KILLED_AFTER)
            run_replicas(cluster, 3)
            wait_for_responses(KILLED_AFTER)
            (killed, *_) = replica_actors()
            kill(killed)
            wait_for_responses(KILLED_AFTER)
            wait_until(lambda: len(replica_actors() - {killed}) == 3)  # it is replaced
            run_replicas(cluster, 1)
            wait_until(lambda: len(replica_actors()) == 1)
            wait_for_responses(KILLED_AFTER)
        finally:
            stop.set()
        for ended in calls:
            ended.result(TIMEOUT_S)


def test_replica_that_stops_finishes_its_requests(ray_url: str, cluster: RayCluster) -> None:
    (before,) = replica_actors()
    with request_in_progress(cluster, REQUEST) as client, ThreadPoolExecutor(1) as pool:
        update = pool.submit(run_replicas, cluster, 1, threads=2)  # replaces the replica
        wait_until(lambda: "STOPPING" in replica_states())
        client.send(REQUEST[-1:])
        assert client.status() == 200
        update.result(TIMEOUT_S)
    wait_until(lambda: len(replica_actors() - {before}) == 1)
