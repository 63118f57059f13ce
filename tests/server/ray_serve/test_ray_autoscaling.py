"""Test of Ray's autoscaler with the policy of the deployment, under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from qkv import Client
from qkv.server.ray_serve import Replica
from qkv.server.ray_serve.autoscaling_policy import QueuedWorkPolicy
from support.processes import wait_until
from support.ray_replicas import delete_replicas, rare_of_ray, replica_states

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

MOST: Final = 2  # replicas, each a process that loads torch
CLIENTS: Final = 3  # with long requests; Ray's own policy would add a replica for 64
SCALING: Final = {
    "min_replicas": 1,
    "max_replicas": MOST,
    "target_ongoing_requests": 64,
    "metrics_interval_s": 0.5,  # no other option shortens it
    "look_back_period_s": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1,
    "policy": {
        "policy_function": QueuedWorkPolicy,
        "policy_kwargs": {"target_seconds": 0.02},
    },
}


class Load:
    """Clients that send one kind of request until the end of the block, and check every response.

    Args:
        url: of the service.
        length: of the sequences.
        clients: number of clients.
        pause_s: between the requests of a client.
    """

    def __init__(self, url: str, length: int, clients: int, pause_s: float = 0) -> None:
        self._url, self._pause_s, self._stop = url, pause_s, threading.Event()
        shape = (1, 1, length, 4)
        value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        ones = np.ones(shape, np.float32)  # all weights are equal
        self._inputs: dict[str, Any] = {"query": ones, "key": ones, "value": value}
        self._expected = value.mean(2)
        self.count = 0
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run) for _ in range(clients)]

    def _run(self) -> None:
        with Client(self._url, retries=8) as client:
            while not self._stop.wait(self._pause_s):
                output = client.attend("softmax", **self._inputs, weights="none").output
                np.testing.assert_allclose(output[:, :, 0], self._expected, rtol=1e-3, atol=1e-5)
                self.count += 1

    def wait_until(self, condition: Any) -> None:
        """Waits; fails if a client has failed."""
        wait_until(lambda: any(c.done() for c in self._clients) or condition())
        assert not any(c.done() for c in self._clients), [
            c.exception() for c in self._clients if c.done()
        ]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for ended in self._clients:
            ended.result()


@rare_of_ray
@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_few_long_requests_add_replicas_and_their_end_removes_them(cluster: RayCluster) -> None:
    delete_replicas(cluster)
    cluster.run(Replica, SCALING, device="cpu")
    assert replica_states() == {"RUNNING": 1}
    with Load(cluster.url, 8, clients=1, pause_s=0.05) as light:
        with Load(cluster.url, 16384, CLIENTS) as heavy:
            heavy.wait_until(lambda: replica_states().get("RUNNING") == MOST)
            least = heavy.count + CLIENTS
            heavy.wait_until(lambda: heavy.count >= least)
            assert replica_states() == {"RUNNING": MOST}  # no more are started
        least = light.count
        light.wait_until(lambda: replica_states() == {"RUNNING": 1})
        light.wait_until(lambda: light.count >= least + 10)
    delete_replicas(cluster)
