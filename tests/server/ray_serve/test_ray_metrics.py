"""Tests of the metrics of replicas, as Prometheus finds them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from qkv import Client
from support.clients import numbers
from support.processes import wait_until
from support.ray_replicas import rare_of_ray, replica_actors, run_replicas

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster


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
    wait_until(lambda: len(replica_actors()) == 2)
    replicas = {name.rpartition("#")[2] for name in replica_actors()}

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
