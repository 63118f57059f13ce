"""A Ray that tests share, and replicas of qkv on it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
from ruamel.yaml import YAML

from support.paths import ROOT
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import RawClient

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

_IN_PROGRESS: Final = "qkv_requests_in_progress"

_CONFIG: Final = ROOT / "deploy" / "ray" / "config.yaml"
_START_S: Final = 180.0  # Ray itself would wait 60 s: two replicas on a busy machine took longer
_QUICK: Final = {
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1,
    "policy": {
        "policy_function": "qkv.server.ray_serve.autoscaling_policy:QueuedWorkPolicy",
        "policy_kwargs": {"target_seconds": 0.02},
    },
}
"""Options of Ray's autoscaler for tests."""

_running = contextlib.ExitStack()
_clusters: list[RayCluster] = []

rare_of_ray: Final = pytest.mark.rare(
    "service/qkv/server/ray_serve",
    "deploy/ray",
    "tests/support/haproxy_cluster.py",
    "tests/support/ray_cluster.py",
    "tests/support/ray_load.py",
    "tests/support/ray_replicas.py",
)
"""The mark of slow tests of replicas and their proxies."""

shared_replicas: Final = pytest.mark.filterwarnings(
    "ignore:The `metrics_interval_s` field:DeprecationWarning"
)
"""The mark of tests that use `run_replicas`: Ray warns of an option for which it has no other."""


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
    cluster: RayCluster,
    least: int,
    most: int | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Runs replicas with the layers of a checkpoint; returns once they run.

    Ray keeps the replicas that run already, and starts and stops only as many as it takes, unless
    a setting has another value than before: so tests share them.

    Args:
        cluster: a running Ray.
        least: number of replicas.
        most: number up to which Ray's autoscaler adds some.
        options: other options of the deployment.
        **settings: beside those of the configuration of the project.
    """
    deploy(configuration(least, most, options, **shared_settings(cluster), **settings))


def shared_settings(cluster: RayCluster) -> dict[str, Any]:
    """Returns the settings of all replicas that tests share: a checkpoint, written once."""
    from support import small_checkpoints

    folder = cluster.folder / "bert"
    if not folder.exists():
        small_checkpoints.bert(folder)
    return {"checkpoints": f"small={folder}"}


def configuration(
    least: int,
    most: int | None = None,
    options: Mapping[str, Any] | None = None,
    scaling: Mapping[str, Any] = _QUICK,
    **settings: Any,
) -> dict[str, Any]:
    """Returns the configuration of the project with a number of replicas, and with settings.

    The options of the autoscaler are the same for all tests that share replicas: Ray replaces
    these if the policy changes.
    """
    config: dict[str, Any] = YAML(typ="safe").load(_CONFIG.read_text())
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    application["args"] |= settings
    deployment |= options or {}
    number = {"min_replicas": least, "max_replicas": most or least}
    deployment["autoscaling_config"] |= {**scaling, **number}
    return config


def deploy(config: Mapping[str, Any]) -> None:
    """Deploys a configuration as `serve deploy` does; returns once the least replicas run."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus, ServeDeploySchema

    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    end = time.monotonic() + _START_S
    least, most = (deployment["autoscaling_config"][f"{x}_replicas"] for x in ("min", "max"))
    while True:
        state = serve.status().applications[application["name"]]
        assert state.status != ApplicationStatus.DEPLOY_FAILED, state.message
        if state.status == ApplicationStatus.RUNNING:
            running = replica_states()
            if running.keys() == {"RUNNING"} and least <= running["RUNNING"] <= most:
                return
        assert time.monotonic() < end, state
        time.sleep(0.1)


def replica_actors() -> set[str]:
    """Returns the names of the replicas that live."""
    import ray

    time.sleep(0.1)  # tests poll, and the machine is busy
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {a["name"] for a in actors if a["name"].startswith("SERVE_REPLICA::qkv#")}


def replica_states() -> dict[str, int]:
    """Returns the number of replicas in each state; none while Ray builds an application."""
    from ray import serve

    time.sleep(0.3)  # a look takes 0.1 s of CPU time, in several processes
    deployments = serve.status().applications["qkv"].deployments.values()
    return {str(state): n for each in deployments for state, n in each.replica_states.items()}


def kill(actor: str) -> None:
    """Kills a replica, which Ray replaces."""
    import ray

    ray.kill(ray.get_actor(actor, namespace="serve"))


def ongoing_requests(actor: str) -> int:
    """Returns the number of requests that a replica has accepted and not answered."""
    import ray

    count: int = ray.get(ray.get_actor(actor, namespace="serve").get_num_ongoing_requests.remote())
    return count


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
