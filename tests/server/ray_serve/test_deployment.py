"""Tests of the deployment without a running Ray: settings, resources, files, health."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any, Final

import pytest
import ray
from ruamel.yaml import YAML

from qkv.server.ray_serve import Replica, app
from support.paths import ROOT

DEPLOY: Final = ROOT / "deploy" / "ray"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": "no"}, "setting threads is wrong: got 'no': "),
        ({"thread": 1}, "setting thread is wrong"),
        ({"port": 80}, "port has no effect under Ray Serve: got 80, expected http_options"),
        ({"workers": 2}, "workers has no effect under Ray Serve: got 2, expected num_replicas"),
    ],
)
def test_wrong_setting_is_rejected_before_a_replica_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        app(arguments)


def test_wrong_key_is_not_shown() -> None:
    with pytest.raises(ValueError, match="api_keys") as caught:
        app({"api_keys": "se cret"})
    assert "cret" not in str(caught.value)


def test_replica_reserves_its_threads_and_its_gpu() -> None:
    def resources(**arguments: Any) -> Any:
        # Ray has no public way to read it
        return app(arguments)._bound_deployment.ray_actor_options

    assert resources(threads="3") == {"num_cpus": 3, "num_gpus": 0}
    assert resources(device="cuda") == {"num_cpus": 1, "num_gpus": 1}


def load_yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)


def test_configuration_is_valid_and_the_same_in_both_files() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = (DEPLOY / "config.yaml").read_text()
    config = ServeDeploySchema.model_validate(load_yaml(text))
    (application,) = config.applications
    assert application.import_path == "qkv.server.ray_serve:app"
    deployment = app(application.args)._bound_deployment  # Ray has no public way to read it
    (changes,) = application.deployments
    assert changes.name == deployment.name
    manifest = load_yaml((DEPLOY / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert load_yaml(manifest["spec"]["serveConfigV2"]) == load_yaml(text)
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.mark.parametrize("failure", ["device", "thread", "stuck"])
def test_replica_whose_device_fails_is_unhealthy(failure: str) -> None:
    failed = asyncio.Event()
    if failure == "device":
        failed.set()
    engine = SimpleNamespace(is_alive=failure != "thread", failed=failed)
    state = SimpleNamespace(stuck_processes=[0] if failure == "stuck" else [])
    runtime = SimpleNamespace(engine=engine, worker=SimpleNamespace(shared_state=state))
    with pytest.raises(RuntimeError, match="the device"):
        Replica.func_or_class.check_health(SimpleNamespace(_runtime=runtime))
