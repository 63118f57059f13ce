"""Tests of the RayService in deploy/: fields of KubeRay, and pod templates of Kubernetes."""

from __future__ import annotations

from typing import Any, Final

import pytest
from jsonschema import ValidationError

from support.kubernetes_schemas import check_type
from support.kustomization import DEPLOY, Resource, load

RAY_SERVICE: Final[dict[tuple[Any, ...], set[str]]] = {
    (): {"apiVersion", "kind", "metadata", "spec"},
    ("spec",): {
        "excludeHeadPodFromServeSvc", "rayClusterConfig", "serveConfigV2", "serveService",
        "upgradeStrategy",
    },
    ("spec", "rayClusterConfig"): {
        "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
        "headGroupSpec", "headServiceAnnotations", "managedBy", "rayVersion", "suspend",
        "workerGroupSpecs",
    },
    ("spec", "rayClusterConfig", "headGroupSpec"): {
        "enableIngress", "headService", "rayStartParams", "serviceType", "template",
    },
    ("spec", "rayClusterConfig", "workerGroupSpecs", 0): {
        "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts",
        "rayStartParams", "replicas", "scaleStrategy", "suspend", "template",
    },
}  # fmt: skip
"""The fields that KubeRay's reference has for the parts of a RayService, since version 1.4."""


def check_ray_service(resource: Resource) -> None:
    """Checks a RayService, of which no package has a schema.

    Raises:
        ValueError: a field is unknown or missing, or start parameters are not strings.
        jsonschema.ValidationError: a pod template is not valid.
    """
    for path, fields in RAY_SERVICE.items():
        part: Any = resource
        for name in path:
            part = part[name]
        if unknown := part.keys() - fields:
            raise ValueError(f"{path} has unknown fields: got {sorted(unknown)}")
    cluster = resource["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check_type(group["template"], "io.k8s.api.core.v1.PodTemplateSpec")
        if not all(isinstance(text, str) for text in group["rayStartParams"].values()):
            raise ValueError(f"rayStartParams are not strings: got {group['rayStartParams']}")
    for group in cluster["workerGroupSpecs"]:
        if missing := {"groupName", "minReplicas", "maxReplicas"} - group.keys():
            raise ValueError(f"a group of workers has missing fields: got {sorted(missing)}")


def test_ray_service_has_fields_of_kuberay() -> None:
    (resource,) = load(DEPLOY / "ray/rayservice.yaml")
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayService")
    check_type(resource["metadata"], "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    (workers,) = resource["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    check_ray_service(resource)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("serveConfig",), {}),
        (("rayClusterConfig", "rayversion"), "2.60.0"),
        (("rayClusterConfig", "headGroupSpec", "replicas"), 1),
        (("rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("rayClusterConfig", "workerGroupSpecs", 0, "maxreplicas"), 4),
        (("rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "graceSeconds"), 90),
    ],
)
def test_check_finds_wrong_fields_of_kuberay(path: tuple[Any, ...], value: Any) -> None:
    (wrong,) = load(DEPLOY / "ray/rayservice.yaml")
    node = wrong["spec"]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises((ValueError, ValidationError)):
        check_ray_service(wrong)
