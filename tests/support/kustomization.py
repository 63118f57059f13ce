"""The resources of deploy/, as kustomize builds them. kubectl contains it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from support.paths import ROOT

DEPLOY: Final = ROOT / "deploy"
OVERLAYS: Final = sorted(
    path.parent.relative_to(DEPLOY).as_posix()
    for path in DEPLOY.glob("*/overlays/*/kustomization.yaml")
)

Resource = dict[str, Any]


def load(path: Path) -> list[Any]:
    """Returns the documents of a YAML file."""
    return list(YAML(typ="safe").load_all(path.read_text()))


def build(folder: Path) -> list[Resource]:
    """Returns the resources of a kustomization; skips the test where kubectl is missing."""
    if not shutil.which("kubectl"):
        pytest.skip("needs kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    )
    return list(YAML(typ="safe").load_all(done.stdout))


@cache
def built(overlay: str) -> list[Resource]:
    """Returns the resources of an overlay of deploy/."""
    return build(DEPLOY / overlay)
