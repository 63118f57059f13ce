"""Tests of the manifests in deploy/: they conform to the schemas and agree with the service."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import kubernetes_validate
import pytest
from jsonschema import ValidationError

from qkv.server.supervisor import BACKLOG_TIMEOUT_S, EXIT_TIMEOUT_S
from qkv.server.worker import DRAIN_ACCEPT_S, DRAIN_IDLE_S
from qkv.settings import Settings
from support.kubernetes_schemas import VERSIONS, check_type, through_sdk
from support.kustomization import DEPLOY, OVERLAYS, Resource, built, load
from support.paths import ROOT
from support.processes import Process
from support.service_processes import child_pids, open_files

DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
DEPLOYING: Final = (ROOT / "docs/deploying.md").read_text()
GIB: Final = 1 << 30
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def find(resources: list[Resource], kind: str) -> Resource:
    """Returns the only resource of a kind."""
    (resource,) = (r for r in resources if r["kind"] == kind)
    return resource


def pod(overlay: str) -> dict[str, Any]:
    """Returns the pod's specification of an overlay; of KServe's, as far as both kinds state it."""
    if overlay.startswith("k8s"):
        spec: dict[str, Any] = find(built(overlay), "Deployment")["spec"]["template"]["spec"]
        return spec
    runtime = find(built(overlay), "ClusterServingRuntime")["spec"]
    predictor = find(built(overlay), "InferenceService")["spec"]["predictor"]
    return {**predictor, **runtime}


def container(overlay: str) -> dict[str, Any]:
    """Returns the only container of the pods of an overlay."""
    (only,) = pod(overlay)["containers"]
    assert isinstance(only, dict)
    return only


def environment(overlay: str) -> dict[str, Any]:
    """Returns the variables of the container: a value, or its source."""
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container(overlay)["env"]}


def setting(overlay: str, name: str) -> Any:
    """Returns the value of a setting in the container."""
    text = environment(overlay).get(f"QKV_{name.upper()}")
    return Settings.model_fields[name].default if text is None else int(text)


def memory(overlay: str) -> int:
    """Returns the memory limit in bytes."""
    limit = re.fullmatch(r"(\d+)Gi", container(overlay)["resources"]["limits"]["memory"])
    assert limit
    return int(limit[1]) * GIB


# schemas


def test_overlays_of_each_device_and_for_small_clusters_and_an_ingress_exist() -> None:
    assert OVERLAYS == [
        *(f"k8s/overlays/{name}" for name in ("cpu", "gpu", "ingress", "small")),
        *(f"kserve/overlays/{name}" for name in ("cpu", "gpu")),
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", [o for o in OVERLAYS if o.startswith("k8s")])
def test_kubernetes_kinds_conform_to_the_strict_schemas(overlay: str, version: str) -> None:
    for resource in built(overlay):
        assert kubernetes_validate.validate(resource, version, strict=True) == version


@pytest.mark.parametrize("overlay", [o for o in OVERLAYS if o.startswith("kserve")])
def test_kserve_kinds_survive_a_round_trip_through_the_sdk(overlay: str) -> None:
    assert {r["kind"] for r in built(overlay)} == {"ClusterServingRuntime", "InferenceService"}
    for resource in built(overlay):
        assert through_sdk(resource) == resource


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ClusterServingRuntime", ("spec", "terminationGracePeriodSeconds"), 60),
        ("ClusterServingRuntime", ("spec", "protocolVersion"), "v2"),
        ("ClusterServingRuntime", ("spec", "protocolVersions"), "v2"),
        ("ClusterServingRuntime", ("spec", "containers", 0, "readinesProbe"), {}),
        ("ClusterServingRuntime", ("spec", "containers", 0, "readinessProbe", "path"), "/readyz"),
        ("ClusterServingRuntime", ("spec", "containers", 0, "lifecycle", "preStop", "wait"), {}),
        ("ClusterServingRuntime", ("spec", "containers", 0, "args", 5), 8080),
        ("ClusterServingRuntime", ("spec", "supportedModelFormats", 0, "autoselect"), True),
        ("InferenceService", ("spec", "predictor", "terminationGracePeriod"), 60),
        ("InferenceService", ("spec", "predictor", "minReplicas"), "2"),
        ("InferenceService", ("spec", "predictor", "model", "format"), "qkv"),
        ("InferenceService", ("spec", "predictor", "autoScaling", "behavior", "scaleDwn"), {}),
        ("InferenceService", ("metadata", "annotation"), {}),
    ],
)
def test_round_trip_finds_wrong_fields_of_kserve(
    kind: str, path: tuple[Any, ...], value: Any
) -> None:
    wrong = node = copy.deepcopy(find(built("kserve/overlays/cpu"), kind))
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises((ValueError, TypeError, ValidationError)):
        through_sdk(wrong)


def test_scaled_object_has_fields_of_keda() -> None:
    """The fields of KEDA's documentation: kubernetes-validate has no schema of KEDA's kinds."""
    (scaled,) = load(DEPLOY / "k8s/keda/scaled-object.yaml")
    assert scaled.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = scaled["spec"]
    assert spec.keys() == {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers", "advanced")
    }
    assert spec["scaleTargetRef"] == {"name": "qkv"}
    (trigger,) = spec["triggers"]
    assert trigger.keys() == {"type", "metadata"}
    assert all(isinstance(text, str) for text in trigger["metadata"].values())
    assert trigger["metadata"].keys() == {"serverAddress", "query", "threshold"}
    (config,) = spec["advanced"].values()
    check_type(config["behavior"], "io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior")


def test_pod_monitor_has_fields_of_the_operator_and_finds_the_pods() -> None:
    """The fields of its documentation: kubernetes-validate has no schema of this kind."""
    (monitor,) = load(DEPLOY / "k8s/pod-monitor/pod-monitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    overlay = "k8s/overlays/cpu"
    labels = find(built(overlay), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"] == {"matchLabels": labels}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    assert endpoint["port"] in {port["name"] for port in container(overlay)["ports"]}


# agreement with the image and the service


@each_overlay
def test_container_is_hardened_and_runs_as_the_user_of_the_image(overlay: str) -> None:
    security = pod(overlay).get("securityContext", {}) | container(overlay)["securityContext"]
    user = re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert user
    assert security == {
        "runAsNonRoot": True,
        "runAsUser": int(user[1]),
        "runAsGroup": int(user[1]),
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(overlay)["automountServiceAccountToken"] is False
    assert pod(overlay)["enableServiceLinks"] is False
    assert [m["mountPath"] for m in container(overlay)["volumeMounts"]] == ["/tmp"]


@each_overlay
def test_ports_are_those_of_the_command(overlay: str) -> None:
    only = container(overlay)
    port, *others = only["ports"]
    command = re.search(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert command
    arguments = only.get("args", json.loads(command[1]))
    assert arguments == ["qkv", "serve", "--host", "0.0.0.0", "--port", str(port["containerPort"])]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert only[probe]["httpGet"]["port"] in (port["name"], port["containerPort"])
    metrics_port = environment(overlay)["QKV_METRICS_PORT"]
    if overlay.startswith("kserve"):
        assert (only["name"], port["containerPort"]) == ("kserve-container", 8080)
        annotations = find(built(overlay), "ClusterServingRuntime")["spec"]["annotations"]
        assert annotations["prometheus.kserve.io/port"] == metrics_port
        assert others == []  # KServe's Service would have each port
    else:
        annotations = find(built(overlay), "Deployment")["spec"]["template"]["metadata"][
            "annotations"
        ]
        assert annotations["prometheus.io/port"] == metrics_port
        assert others == [{"name": "metrics", "containerPort": int(metrics_port)}]
        allowed = find(built(overlay), "NetworkPolicy")["spec"]["ingress"][0]["ports"]
        assert allowed == [{"port": port["name"]}, {"port": "metrics"}]
        (service_port,) = find(built(overlay), "Service")["spec"]["ports"]
        assert service_port["targetPort"] == port["name"]


@each_overlay
def test_probes_ask_the_service(overlay: str, url: str) -> None:
    only = container(overlay)
    paths = {
        p: only[p]["httpGet"]["path"] for p in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"
    }  # fmt: skip
    assert all(httpx.get(url + path).status_code == 200 for path in paths.values())


@each_overlay
def test_grace_period_covers_the_sleep_and_the_longest_drain(overlay: str) -> None:
    sleep = container(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest = (
        DRAIN_ACCEPT_S
        + BACKLOG_TIMEOUT_S
        + DRAIN_IDLE_S
        + setting(overlay, "drain_s")
        + EXIT_TIMEOUT_S
    )
    assert pod(overlay)["terminationGracePeriodSeconds"] > sleep + longest
    probe = container(overlay)["readinessProbe"]
    assert sleep > 2 * probe["periodSeconds"] * probe["failureThreshold"]


@each_overlay
def test_every_variable_is_a_setting_with_a_valid_value(overlay: str) -> None:
    known = {f"QKV_{name.upper()}" for name in Settings.model_fields}
    assert set(environment(overlay)) <= known
    plain = {n: v for n, v in environment(overlay).items() if isinstance(v, str)}
    Settings.model_validate({n.removeprefix("QKV_").lower(): v for n, v in plain.items()})
    reference = {"name": "qkv", "key": "api-keys", "optional": True}
    assert environment(overlay)["QKV_API_KEYS"] == {"secretKeyRef": reference}
    assert "--from-literal=api-keys=" in DEPLOYING


@each_overlay
def test_workers_and_queues_fit_the_limits(overlay: str) -> None:
    resources = container(overlay)["resources"]
    cpus = int(resources["limits"]["cpu"])
    assert resources["requests"] == {"cpu": str(cpus), "memory": resources["limits"]["memory"]}
    queue = setting(overlay, "max_queue_bytes")
    if not overlay.endswith("gpu"):
        assert environment(overlay)["QKV_DEVICE"] == "cpu"
        assert environment(overlay)["QKV_WORKERS"] == {
            "resourceFieldRef": {"resource": "limits.cpu"}
        }
        transfers = setting(overlay, "max_body_bytes") + 2 * setting(overlay, "max_response_bytes")
        assert memory(overlay) > cpus * (2 * queue + transfers + GIB // 2)  # keys may double it
    else:
        workers = setting(overlay, "workers")
        assert environment(overlay)["QKV_DEVICE"] == "cuda"
        assert resources["limits"]["nvidia.com/gpu"] == "1"
        assert cpus == workers + 1  # the device process
        assert memory(overlay) > workers * 2 * queue + (workers + 1) * GIB


@each_overlay
def test_resources_find_each_other(overlay: str) -> None:
    resources = built(overlay)
    if overlay.startswith("kserve"):
        model = find(resources, "InferenceService")["spec"]["predictor"]["model"]
        runtime = find(resources, "ClusterServingRuntime")["spec"]
        assert model["modelFormat"]["name"] == runtime["supportedModelFormats"][0]["name"]
        assert model["protocolVersion"] in runtime["protocolVersions"]
        return
    labels = find(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert find(resources, "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert find(resources, "Service")["spec"]["selector"] == labels
    assert find(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert find(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    for scaler in (r for r in resources if r["kind"] == "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", "qkv")


def test_small_overlay_fits_a_node_of_one_cpu_and_2_gib() -> None:
    """No autoscaler either: kind and minikube have no metrics for it."""
    overlay = "k8s/overlays/small"
    assert container(overlay)["resources"]["limits"] == {"cpu": "1", "memory": "2Gi"}
    assert "HorizontalPodAutoscaler" not in {r["kind"] for r in built(overlay)}
    rollout = find(built(overlay), "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rollout == {"maxSurge": 0, "maxUnavailable": 1}


def test_ingress_has_the_limits_of_the_service_and_tls() -> None:
    overlay = "k8s/overlays/ingress"
    ingress, service = (find(built(overlay), kind) for kind in ("Ingress", "Service"))
    (rule,), (tls,) = ingress["spec"]["rules"], ingress["spec"]["tls"]
    assert tls["hosts"] == [rule["host"]]
    assert f"kubectl create secret tls {tls['secretName']} " in DEPLOYING
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"name": service["spec"]["ports"][0]["name"]},
    }
    prefix = "nginx.ingress.kubernetes.io/"
    annotations = ingress["metadata"]["annotations"]
    assert all(name.startswith(prefix) for name in annotations)
    options = {name.removeprefix(prefix): text for name, text in annotations.items()}
    body_size = re.fullmatch(r"(\d+)m", options["proxy-body-size"])
    assert body_size
    assert int(body_size[1]) << 20 == setting(overlay, "max_body_bytes")
    assert int(options["proxy-read-timeout"]) >= Settings.model_fields["stuck_device_s"].default
    assert int(options["proxy-send-timeout"]) > Settings.model_fields["read_timeout_s"].default
    assert {options["proxy-buffering"], options["proxy-request-buffering"]} == {"off"}
    assert options["ssl-redirect"] == "true"
    cpu = {r["kind"]: r for r in built("k8s/overlays/cpu")}
    assert {r["kind"]: r for r in built(overlay) if r is not ingress} == cpu


def test_scaling_reads_metrics_of_the_queue_that_exist(url: str) -> None:
    files = [*DEPLOY.rglob("autoscaler.yaml"), *DEPLOY.rglob("scaled-object.yaml")]
    files += DEPLOY.rglob("base/inference-service.yaml")
    named = {m for path in files for m in re.findall(r"qkv_[a-z_]+", path.read_text())}
    assert named == {"qkv_queue_depth", "qkv_queue_wait_seconds_sum"}
    metrics = httpx.get(f"{url}/metrics").text
    assert all(re.search(rf"^{name}[ {{]", metrics, re.MULTILINE) for name in named)


def test_commands_of_the_page_name_every_overlay() -> None:
    assert set(re.findall(r"kubectl apply -k deploy/(\S+)", DEPLOYING)) == set(OVERLAYS)


@pytest.mark.slow
def test_device_process_uses_no_shared_memory_of_the_system(
    shared_process: Callable[..., Process],
) -> None:
    """Pods mount no memory for /dev/shm."""
    started = shared_process("--workers", "2", QKV_DEVICE_PROCESS="one")
    for pid in [started.popen.pid, *child_pids(started.popen.pid)]:
        assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        assert not any(file.startswith("/dev/shm") for file in open_files(pid))
