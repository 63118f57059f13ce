"""Tests of the commented lines in the manifests: without `#: `, the service loads a checkpoint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from qkv.settings import Settings
from support import small_checkpoints
from support.kubernetes_schemas import VERSIONS, through_sdk
from support.kustomization import DEPLOY, OVERLAYS, Resource, build, load
from support.paths import ROOT
from support.processes import Process

MARK: Final = re.compile(r"^( *)#: ", re.MULTILINE)
CHECKPOINT: Final = "all-MiniLM-L6-v2"


def uncommented(text: str) -> str:
    """Returns a manifest whose commented lines are part of it."""
    assert MARK.search(text)
    return MARK.sub(r"\1", text)


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/ with the lines of a checkpoint."""
    copy = tmp_path_factory.mktemp("manifests") / "deploy"
    shutil.copytree(DEPLOY, copy)
    changed = {path for path in copy.rglob("*.yaml") if MARK.search(path.read_text())}
    for path in changed:
        path.write_text(uncommented(path.read_text()))
    assert {str(path.relative_to(copy)) for path in changed} == {
        "k8s/base/deployment.yaml", "kserve/base/runtime.yaml",
        "kserve/base/inference-service.yaml", "ray/config.yaml", "ray/rayservice.yaml",
    }  # fmt: skip
    return copy


def find(resources: list[Resource], kind: str) -> dict[str, Any]:
    """Returns the specification of the only resource of a kind."""
    (resource,) = (r for r in resources if r["kind"] == kind)
    spec: dict[str, Any] = resource["spec"]
    return spec


def checkpoints(container: dict[str, Any]) -> dict[str, Path]:
    """Returns the checkpoints of a container's environment."""
    values = {v["name"]: v.get("value") for v in container["env"]}
    assert values["QKV_MAX_CHECKPOINT_BYTES"] == str(1 << 30)
    return Settings(checkpoints=values["QKV_CHECKPOINTS"]).checkpoint_paths


@pytest.mark.parametrize("name", [n for n in OVERLAYS if n.startswith("k8s")])
def test_deployment_mounts_the_claim_of_its_checkpoint(deploy: Path, name: str) -> None:
    resources = build(deploy / name)
    for version in VERSIONS:
        for resource in resources:
            assert kubernetes_validate.validate(resource, version, strict=True) == version
    pod = find(resources, "Deployment")["template"]["spec"]
    (container,) = pod["containers"]
    assert checkpoints(container) == {"minilm": Path("/models") / CHECKPOINT}
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


@pytest.mark.parametrize("name", [n for n in OVERLAYS if n.startswith("kserve")])
def test_runtime_reads_what_kserve_mounts(deploy: Path, name: str) -> None:
    resources = build(deploy / name)
    for resource in resources:
        assert through_sdk(resource) == resource
    (container,) = find(resources, "ClusterServingRuntime")["containers"]
    assert checkpoints(container) == {"minilm": Path("/mnt/models")}  # KServe's own place
    model = find(resources, "InferenceService")["predictor"]["model"]
    assert model["storageUri"] == f"pvc://models/{CHECKPOINT}"


def test_ray_service_and_its_configuration_have_the_checkpoint(deploy: Path) -> None:
    (service,) = load(deploy / "ray/rayservice.yaml")
    (configuration,) = load(deploy / "ray/config.yaml")
    assert YAML(typ="safe").load(service["spec"]["serveConfigV2"]) == configuration
    (application,) = configuration["applications"]
    assert application["args"]["max_checkpoint_bytes"] == 1 << 30
    paths = Settings(**application["args"]).checkpoint_paths
    assert paths == {"minilm": Path("/models") / CHECKPOINT}
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert volume["name"] == "models"
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_compose_file_mounts_the_folder_of_its_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "docker-compose.yml"
    path.write_text(uncommented((ROOT / "docker-compose.yml").read_text()))
    tool = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*tool, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    services = YAML(typ="safe").load(path.read_text())["services"]
    for name in ("qkv", "qkv-gpu"):
        assert {"./models:/models:ro", "./variants:/variants:ro"} == {*services[name]["volumes"]}
        assert services[name]["environment"]["QKV_CHECKPOINTS"] is None  # that of the shell
    assert f"QKV_CHECKPOINTS=minilm=/models/{CHECKPOINT}" in path.read_text()


@pytest.mark.slow
def test_pod_is_ready_once_its_layers_are_loaded(
    tmp_path: Path, command: Callable[..., Process]
) -> None:
    """The probes of the manifests ask /readyz, which nothing answers before."""
    folder = small_checkpoints.bert(tmp_path / "bert")
    service = command("serve", "--port", "0", QKV_CHECKPOINTS=f"small={folder}")
    assert httpx.get(f"{service.url}/readyz").is_success
    assert len(httpx.get(f"{service.url}/v1/layers").json()["layers"]) == 2
