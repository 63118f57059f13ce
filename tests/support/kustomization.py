"""Builds the resources of deploy/ as kustomize does, with the features that deploy/ uses.

The CI's machines have no kustomize. A test compares the results where kubectl is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from support.paths import ROOT

DEPLOY: Final = ROOT / "deploy"
OVERLAYS: Final = sorted(path.parent for path in DEPLOY.glob("*/overlays/*/kustomization.yaml"))

_FIELDS: Final = {"apiVersion", "kind", "resources", "components", "images", "patches"}

Resource = dict[str, Any]


def load(path: Path) -> list[Any]:
    """Returns the documents of a YAML file."""
    return list(YAML(typ="safe").load_all(path.read_text()))


def build(folder: Path) -> list[Resource]:
    """Returns the resources of a kustomization."""
    (kustomization,) = load(folder / "kustomization.yaml")
    assert set(kustomization) <= _FIELDS, "the builder lacks a feature"
    resources: list[Resource] = []
    for name in kustomization.get("resources", []) + kustomization.get("components", []):
        path = (folder / name).resolve()
        resources += build(path) if path.is_dir() else load(path)
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        (resource,) = (
            r
            for r in resources
            if (r["kind"], r["metadata"]["name"]) == (target["kind"], target["name"])
        )
        (operations,) = load(folder / patch["path"])
        for operation in operations:
            _apply(resource, operation)
    for image in kustomization.get("images", []):
        for resource in resources:
            _rename_images(resource, image["name"], f"{image['newName']}:{image['newTag']}")
    return resources


def _apply(resource: Resource, operation: dict[str, Any]) -> None:
    """Applies `add` or `replace` of a JSON patch (RFC 6902)."""
    assert operation["op"] in ("add", "replace")
    *parents, last = operation["path"].removeprefix("/").split("/")
    node: Any = resource
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if operation["op"] == "replace":
        assert last in node
        node[last] = operation["value"]
    elif isinstance(node, list):
        assert last == "-"
        node.append(operation["value"])
    else:
        assert last not in node
        node[last] = operation["value"]


def _rename_images(node: Any, old: str, new: str) -> None:
    if isinstance(node, list):
        for each in node:
            _rename_images(each, old, new)
    elif isinstance(node, dict):
        if node.get("image") == old:
            node["image"] = new
        for each in node.values():
            _rename_images(each, old, new)
