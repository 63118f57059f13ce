"""Tests of two replicas behind Ray's proxy: layers of a checkpoint, and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np
import pytest
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE  # Ray exports it nowhere

from qkv import Client
from support import small_checkpoints
from support.clients import numbers
from support.processes import wait_until
from support.ray_replicas import rare_of_ray, replica_actors, run_replicas

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

RESPONSES: Final = 20  # two replicas take turns


@pytest.fixture(scope="module")
def replicas(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Returns the names of two replicas that serve the layers of a checkpoint."""
    folder = small_checkpoints.bert(tmp_path_factory.mktemp("checkpoint") / "bert")
    run_replicas(cluster, 2, checkpoints=f"small={folder}")
    wait_until(lambda: len(replica_actors()) == 2)
    return {name.rpartition("#")[2] for name in replica_actors()}


@pytest.mark.usefixtures("replicas")
def test_every_replica_serves_the_layers_of_the_checkpoint(cluster: RayCluster) -> None:
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
        for _ in range(RESPONSES):
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
def test_prometheus_finds_the_requests_of_every_replica(
    cluster: RayCluster, replicas: set[str]
) -> None:
    def counted() -> set[str]:
        """Returns the replicas that Prometheus sees with successful requests."""
        with Client(cluster.url) as client:
            client.attend("softmax", **numbers())
        wanted = {
            "application": "default", "deployment": "qkv", "variant": "softmax", "outcome": "ok"
        }.items()  # fmt: skip
        return {
            labels["replica"]
            for labels, value in discovered_samples(cluster, "ray_qkv_requests_total")
            if wanted <= labels.items() and value >= 1
        }

    wait_until(lambda: counted() >= replicas)
