"""Tests of deployments by Ray's commands, and of the reasons that they show if one fails."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.scripts import cli

from qkv import Client
from qkv.server.ray_serve import Replica
from support.clients import exact_softmax, numbers
from support.processes import wait_until
from support.ray_replicas import configuration, rare_of_ray, shared_replicas, shared_settings

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

pytestmark = shared_replicas


def invoke(cluster: RayCluster, *words: str) -> str:
    """Returns the output of the command `serve`."""
    done = CliRunner().invoke(cli, [*words, "--address", cluster.dashboard_url])
    assert done.exit_code == 0, done.output
    return done.stdout


def wait_for_status(cluster: RayCluster, name: str, status: str) -> None:
    """Waits until an application has this status in the data of `serve status`."""
    client = ServeSubmissionClient(cluster.dashboard_url)

    def has_status() -> bool:
        time.sleep(0.1)  # tests poll, and the machine is busy
        return bool(client.get_serve_details()["applications"][name]["status"] == status)

    wait_until(has_status)


@rare_of_ray
def test_configuration_is_deployed_beside_one_that_is_wrong(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Later tests use the replica that the command starts: its settings are theirs."""
    config = configuration(1, **shared_settings(cluster))
    (application,) = config["applications"]
    wrong = {"name": "wrong", "route_prefix": "/wrong", "args": {"threads": "no"}}
    config["applications"].append(application | wrong | {"deployments": []})
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    serve.delete(application["name"])
    invoke(cluster, "deploy", str(path))
    wait_for_status(cluster, "wrong", "DEPLOY_FAILED")
    assert "setting threads is wrong: got 'no': " in invoke(cluster, "status", "--name", "wrong")
    wait_for_status(cluster, application["name"], "RUNNING")
    inputs = numbers()
    with Client(cluster.url, retries=0) as client:
        output = client.attend("softmax", **inputs).output
    np.testing.assert_allclose(output, exact_softmax(**inputs), rtol=1e-4, atol=1e-5)


def test_replica_that_cannot_start_shows_its_reason(cluster: RayCluster) -> None:
    deployment = Replica.options(max_constructor_retry_count=1)
    with pytest.raises(RuntimeError, match="setting thread is wrong: got 1"):
        cluster.run(deployment, 1, name="failing", route=None, thread=1)
    serve.delete("failing")
