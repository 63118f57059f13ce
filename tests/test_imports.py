"""Imports run downwards only, and the client's side knows no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

PACKAGE = Path(qkv.__file__).parent

# what each room may import of qkv, beside itself; CONVENTIONS.md says why
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "tensors": {"errors"},
    "message": {"tensors"},
    "wire": {"errors", "literals", "message", "tensors"},
    "files": {"errors", "message", "tensors", "wire"},
    "oneline": {"errors"},
    "models": {"metrics"},
    "metrics": {"errors"},
    "lines": set(),
    "standard_error": {"lines"},
    "fleet": {"metrics", "models"},
    "heap": set(),
    "cpus": set(),
    "port": {"errors", "wire"},
    "arrays": {"tensors"},
    "heads": {"heatmap"},
    "notebook": {"arrays", "heads", "heatmap"},
    "results": {"notebook"},
    "tables": set(),
    "compared": {"tables"},
    "events": set(),
    "cells": {"errors", "events", "tables"},
    "plot": {"cells"},
    "bar": set(),
    "streams": {"bar", "cells", "errors", "events"},
    "calls": {"arrays", "compared", "errors", "events", "message", "results", "wire"},
    "attempts": {"calls", "errors", "events"},
    "client": {"attempts", "calls", "compared", "events", "results", "streams"},
    "async_client": {"attempts", "calls", "compared", "events", "results", "streams"},
    "attention": {"errors"},
    "catalogue": {"attention", "errors", "tensors"},
    "layers": {"errors"},
    "literals": {"errors", "tensors"},
    "binding": {"catalogue", "errors"},
    "fields": {"errors", "message"},
    "inputs": {
        "binding", "catalogue", "errors", "fields", "layers", "literals", "message", "tensors",
    },
    "forms": {"catalogue", "errors"},
    "job": {"catalogue", "errors", "fields", "forms", "inputs", "layers", "message", "tensors"},
    "gradient": {
        "catalogue", "errors", "fields", "inputs", "job", "literals", "message", "tensors",
    },
    "choice": {"catalogue", "errors", "fields"},
    "closeness": {"tensors"},
    "spread": set(),
    "measured": {"catalogue", "job"},
    "divergence": {
        "catalogue", "fields", "inputs", "job", "layers", "measured", "message", "spread",
    },
    "comparison": {
        "choice", "divergence", "errors", "fields", "job", "measured", "message", "tensors",
    },
    "findings": {"closeness", "comparison", "job", "measured", "spread", "tensors"},
    "sweep": {
        "catalogue", "choice", "errors", "fields", "job", "measured", "message", "tensors",
    },
    "conversion": {"fields", "layers", "literals", "message", "tensors"},
    "blocks": {"attention", "catalogue", "forms"},
    "passes": {"blocks", "divergence", "gradient", "job", "layers", "measured"},
    "run": {"job", "layers", "passes", "tensors"},
    "course": {"choice", "errors", "findings", "job", "measured", "sweep", "tensors"},
    "local": {
        "catalogue", "comparison", "conversion", "course", "faults", "findings", "gradient", "job",
        "message", "run", "sweep", "tensors",
    },
    "heatmap": set(),
    "picture": {"catalogue", "heatmap", "local", "message", "tensors"},
    "queue": {"errors", "job", "tensors"},
    "door": {"errors", "queue"},
    "faults": {"errors"},
    "ledger": {"job", "models", "queue", "run"},
    "engine": {"door", "errors", "faults", "job", "ledger", "metrics", "queue", "run"},
    "arena": {"errors"},
    "channel": set(),
    "exchange": set(),
    "parcel": {
        "arena", "divergence", "gradient", "job", "layers", "measured", "message", "tensors",
    },
    "remote": {
        "arena", "channel", "door", "engine", "errors", "exchange", "fleet", "job", "ledger",
        "metrics", "parcel", "queue", "run", "tensors",
    },
    "warmup": {"catalogue", "engine", "errors", "job", "message", "tensors"},
    "device_process": {
        "arena", "channel", "engine", "errors", "exchange", "fleet", "job", "parcel", "queue",
        "warmup",
    },
    "tracing": {"__version__"},
    "routes": {
        "__version__", "catalogue", "comparison", "conversion", "course", "door", "engine",
        "errors", "fields", "findings", "fleet", "forms", "gradient", "job", "layers", "ledger",
        "lines", "local", "measured", "message", "metrics", "models", "picture", "queue", "remote",
        "run", "settings", "sweep", "tensors", "tracing", "wire",
    },
    "app": {
        "__version__", "arena", "busy_poll", "catalogue", "connection", "cpus", "device_process",
        "engine", "errors", "fleet", "lines", "protocol", "queue", "remote", "routes",
        "settings", "short", "warmup", "watch", "wire",
    },
    "acceptor": {"fleet"},
    "watch": set(),
    "connection": {"errors", "watch"},
    "busy_poll": {"fleet"},
    "filling": set(),
    "protocol": {
        "busy_poll", "connection", "door", "errors", "filling", "fleet", "routes", "short", "watch",
    },
    "short": {"door", "routes"},
    "serve": {
        "acceptor", "app", "arena", "cpus", "engine", "exchange", "fleet", "heap", "port", "remote",
        "settings", "standard_error",
    },
    "ask": {
        "calls", "cells", "client", "compared", "errors", "events", "files", "local", "message",
        "oneline", "plot", "streams", "tensors", "wire",
    },
    "cli": {"__version__", "ask", "oneline", "serve", "settings"},
    "__init__": {
        "async_client", "calls", "cells", "client", "compared", "errors", "results", "streams",
    },
    "__main__": {"cli"},
}  # fmt: skip

CLIENT_SIDE = (
    "errors", "tensors", "message", "wire", "arrays", "files", "heatmap", "heads", "notebook",
    "results", "tables", "compared", "events", "cells", "plot", "bar", "streams", "calls",
    "attempts", "client", "async_client", "oneline", "ask", "cli", "__init__",
)  # fmt: skip
WEB = {"fastapi", "starlette", "uvicorn"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The first part of a module's name below qkv."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every dotted name that a file imports, names imported from a package included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if module == "qkv" else module for a in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downwards(path: Path) -> None:
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("qkv.")}
    assert ours - {room(path)} <= ALLOWED[room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_foreign_imports_keep_their_place(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)}
    if room(path) not in ("routes", "app", "connection", "protocol", "serve"):
        assert not foreign & WEB
    if room(path) in CLIENT_SIDE:
        assert "torch" not in foreign
    if room(path) != "tracing":
        assert "opentelemetry" not in foreign
    if room(path) not in ("settings", "cli"):
        assert "pydantic_settings" not in foreign
        assert not re.search(r"\b(environ|getenv)\b", path.read_text())


def test_every_room_is_listed() -> None:
    assert {room(path) for path in FILES} == set(ALLOWED)


def test_importing_qkv_imports_no_torch() -> None:
    code = "import qkv, qkv.cli, sys; assert 'torch' not in sys.modules; print(qkv.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == qkv.__version__


def test_the_public_names_are_sorted_and_there() -> None:
    assert qkv.__all__ == sorted(qkv.__all__)
    assert all(hasattr(qkv, name) for name in qkv.__all__)
