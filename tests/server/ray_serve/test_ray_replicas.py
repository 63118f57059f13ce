"""Tests of two replicas: that Ray's autoscaler adds, under load, and that die and stop.

Each test finds the replicas that the one before it has left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE  # Ray exports it nowhere

from qkv import Client
from support import small_checkpoints
from support.clients import numbers
from support.processes import wait_until
from support.raw_connection import encode_body, encode_request, random_inputs
from support.ray_load import Load
from support.ray_replicas import (
    kill,
    ongoing_requests,
    rare_of_ray,
    raw_request,
    replica_actors,
    replica_states,
    run_replicas,
    shared_replicas,
)

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

pytestmark = shared_replicas

LONG: Final = 16384  # length of sequences: a second of one thread
RESPONSES: Final = 30  # of four clients between changes: some requests are in the replica then
REQUEST: Final = encode_request(*encode_body(random_inputs(0)))


@rare_of_ray
def test_few_long_requests_add_a_replica(cluster: RayCluster) -> None:
    run_replicas(cluster, 1)
    run_replicas(cluster, 1, most=2)
    with Load(cluster.url, clients=1) as light:
        with Load(cluster.url, clients=3, length=LONG) as heavy:  # Ray's own policy waits for 64
            heavy.wait_until(lambda: sum(replica_states().values()) == 2)
        # it starts beside requests that leave it the CPU, and stays
        run_replicas(cluster, 2)
        light.wait_for_responses(RESPONSES)


def test_every_replica_serves_the_layers_of_the_checkpoint(cluster: RayCluster) -> None:
    run_replicas(cluster, 2)
    assert httpx.get(f"{cluster.url}/readyz").is_success
    x = np.random.default_rng(0).normal(size=(5, small_checkpoints.WIDTH)).astype(np.float32)
    tensors = {
        name.removeprefix("encoder.layer.1.attention."): tensor
        for name, tensor in small_checkpoints.bert_tensors().items()
        if name.startswith("encoder.layer.1.")
    }
    sent = {"layout": "bert", "heads": small_checkpoints.HEADS}
    with Client(cluster.url, retries=8) as client:
        assert [layer["name"] for layer in client.layers()] == [
            "small.encoder.layer.0", "small.encoder.layer.1",
        ]  # fmt: skip
        expected = client.attend("softmax", x=x, layer={**sent, "tensors": tensors})
        for _ in range(20):  # two replicas take turns
            run = client.attend("softmax", x=x, layer="small.encoder.layer.1")
            assert np.array_equal(run.output, expected.output)
            assert np.array_equal(run.weights, expected.weights)


def discovered_samples(cluster: RayCluster, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yields labels and value of each sample, from the targets that Ray's dashboard lists."""
    (group,) = json.loads((cluster.folder / PROMETHEUS_SERVICE_DISCOVERY_FILE).read_text())
    for target in group["targets"]:
        try:
            text = httpx.get(f"http://{target}/metrics").raise_for_status().text
        except httpx.ConnectError:  # Prometheus calls such a target down
            continue
        for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            yield dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)


@rare_of_ray
def test_prometheus_finds_the_requests_of_every_replica(cluster: RayCluster) -> None:
    run_replicas(cluster, 2)
    replicas = {name.rpartition("#")[2] for name in replica_actors()}

    def counted() -> set[str]:
        """Returns the replicas that Prometheus sees with successful requests."""
        with Client(cluster.url) as client:
            client.attend("softmax", **numbers())
        wanted = {
            "application": "qkv", "deployment": "qkv", "variant": "softmax", "outcome": "ok"
        }.items()  # fmt: skip
        return {
            labels["replica"]
            for labels, value in discovered_samples(cluster, "ray_qkv_requests_total")
            if wanted <= labels.items() and value >= 1
        }

    wait_until(lambda: counted() >= replicas)


@rare_of_ray
def test_no_call_fails_while_replicas_die_and_stop(cluster: RayCluster) -> None:
    """A request without retries gets 500; Ray's autoscaler stops the replica without work."""
    run_replicas(cluster, 2)
    with raw_request(cluster, REQUEST[:-1]) as raw:
        wait_until(lambda: any(map(ongoing_requests, replica_actors())))
        (killed,) = filter(ongoing_requests, replica_actors())
        with Load(cluster.url, clients=4) as load:
            load.wait_for_responses(RESPONSES)
            kill(killed)
            assert raw.status() == 500
            assert raw.header("content-type").startswith("text/plain")
            load.wait_for_responses(RESPONSES)
            load.wait_until(lambda: len(replica_actors() - {killed}) == 2)  # it is replaced
            load.wait_until(lambda: replica_states() == {"RUNNING": 2})
            run_replicas(cluster, 1, most=2)
            load.wait_until(lambda: replica_states() == {"RUNNING": 1})
            load.wait_for_responses(RESPONSES)
