"""A Ray that tests share, and replicas of qkv on it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import RawClient

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

_IN_PROGRESS: Final = "qkv_requests_in_progress"

_running = contextlib.ExitStack()
_deployed: dict[RayCluster, Any] = {}
_clusters: list[RayCluster] = []

rare_of_ray: Final = pytest.mark.rare(
    "service/qkv/server/ray_serve",
    "deploy/ray",
    "tests/support/haproxy_cluster.py",
    "tests/support/ray_cluster.py",
    "tests/support/ray_replicas.py",
)
"""The mark of slow tests of replicas and their proxies."""


@pytest.fixture(scope="module")
def cluster(_clean_environment: None) -> RayCluster:
    """Returns a Ray with its dashboard; it runs until a test of this process does not use it."""
    from support.ray_cluster import running_ray  # imports ray, which takes a second

    if not _clusters:
        _clusters.append(_running.enter_context(running_ray(dashboard=True)))
    return _clusters[0]


def end_ray(next_test: pytest.Item | None) -> None:
    """Ends the Ray unless the next test uses it: idle, it takes a sixth of a CPU and 1 GB."""
    if _clusters and "cluster" not in getattr(next_test, "fixturenames", ()):
        _clusters.clear()
        _running.close()


@pytest.fixture(scope="module")
def ray_url(cluster: RayCluster) -> str:
    """Returns the URL of Ray's proxy in front of one replica with default settings."""
    run_replicas(cluster, 1)
    return cluster.url


def run_replicas(
    cluster: RayCluster, count: int, options: Mapping[str, Any] | None = None, **settings: Any
) -> None:
    """Runs this number of replicas, or changes their number, options of Ray or settings.

    Does nothing if nothing changes: `serve.run` always replaces the replicas.
    """
    from qkv.server.ray_serve import Replica

    wanted = count, options, settings
    if _deployed.get(cluster) != wanted:
        deployment = Replica.options(**options or {})
        cluster.run(deployment, count, device="cpu", request_log="json", **settings)
        _deployed[cluster] = wanted


def delete_replicas(cluster: RayCluster) -> None:
    """Stops what `run_replicas` has started."""
    from ray import serve

    _deployed.pop(cluster, None)
    serve.delete("default")


def replica_actors(application: str = "default") -> set[str]:
    """Returns the names of the replicas of an application that live."""
    import ray

    time.sleep(0.1)  # tests poll, and the machine is busy
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {a["name"] for a in actors if a["name"].startswith(f"SERVE_REPLICA::{application}#")}


def replica_states() -> dict[str, int]:
    """Returns the number of replicas in each state."""
    from ray import serve

    time.sleep(0.1)  # tests poll, and the machine is busy
    (deployment,) = serve.status().applications["default"].deployments.values()
    return {str(state): count for state, count in deployment.replica_states.items()}


def kill(actor: str) -> None:
    """Kills a replica, which Ray replaces."""
    import ray

    ray.kill(ray.get_actor(actor, namespace="serve"))


def read_sample(url: str, name: str, **headers: str) -> float:
    """Returns a sample of GET /metrics; there must be one replica."""
    time.sleep(0.02)  # tests poll, and the machine is busy
    lines = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text.splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(f"{name} "))
    return float(value)


@contextlib.contextmanager
def raw_request(cluster: RayCluster, request: bytes) -> Iterator[RawClient]:
    """Sends bytes through the proxy on a connection of its own."""
    with socket.create_connection(cluster.address, TIMEOUT_S) as connection:
        client = RawClient(connection)
        client.send(request)
        yield client


@contextlib.contextmanager
def request_in_progress(cluster: RayCluster, request: bytes) -> Iterator[RawClient]:
    """Sends a request without its last byte; waits until the only replica has accepted it."""
    count = read_sample(cluster.url, _IN_PROGRESS)
    with raw_request(cluster, request[:-1]) as client:
        wait_until(lambda: read_sample(cluster.url, _IN_PROGRESS) > count)
        yield client
