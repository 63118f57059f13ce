"""Tests of the imports inside qkv: the table in CONTRIBUTING.md, and a client without torch."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qkv
from support.forked_scripts import run_program
from support.paths import ROOT

PACKAGE = Path(qkv.__file__).parent

TABLE = re.findall(r"^(\w+) +-> (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
# The imports that each folder or top-level module may make inside qkv, beside its own files.
ALLOWED = {name: set(imported.split(", ")) for name, imported in TABLE}

TORCH_FREE = {"__init__", "__main__", "cli", "client", "errors", "tensors", "wire"}
WEB = {"fastapi", "starlette"}
# files that read the environment
READERS = {"settings.py", "cli/main.py", "cli/own_variants.py", "client/environment.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def folder(path: Path) -> str:
    """Returns the folder or top-level module of a file of qkv."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def module_name(path: Path) -> str:
    """Returns the dotted name of a file of qkv."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Returns every dotted name that a file imports, names from modules included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" for a in node.names}
            found |= {module} - {"qkv"}
    return found


@pytest.mark.slow
def test_files_import_only_the_folders_that_the_table_allows() -> None:
    for path in FILES:
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("qkv.")}
        allowed = ALLOWED.get(folder(path), set())
        assert ours <= allowed | {"errors", folder(path)}, path


@pytest.mark.slow
def test_third_party_imports_stay_in_their_folders() -> None:
    for path in FILES:
        foreign = {name.split(".")[0] for name in imports(path)}
        name = str(path.relative_to(PACKAGE))
        if folder(path) not in ("api", "server"):
            assert not foreign & WEB, path
        if folder(path) in TORCH_FREE:
            assert "torch" not in foreign, path
        if name not in ("telemetry/trace_context.py", "telemetry/tracing.py"):
            assert "opentelemetry" not in foreign, path
        if name not in READERS:
            assert "pydantic_settings" not in foreign, path
            assert not re.search(r"\b(environ|getenv)\b", path.read_text()), path


def test_table_has_no_removed_names_and_each_folder_once() -> None:
    assert len(ALLOWED) == len(TABLE) > 10
    there = {folder(path) for path in FILES}
    assert ALLOWED.keys() | set().union(*ALLOWED.values()) <= there


def test_table_has_no_cycle() -> None:
    assert list(graphlib.TopologicalSorter(ALLOWED).static_order())


def test_files_import_each_other_in_no_circle() -> None:
    """Imports inside functions and for annotations count too. Packages only run before files."""
    modules = {module_name(path): path for path in FILES if path.stem != "__init__"}
    graph = {name: imports(path) & modules.keys() for name, path in modules.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_top_of_the_package_has_few_entries() -> None:
    top = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert sum(path.is_dir() for path in top) <= 12
    assert sum(path.is_file() for path in top) <= 9


def test_import_of_qkv_imports_no_torch_and_no_matplotlib() -> None:
    code = (
        "import qkv, qkv.cli.main, sys; assert not {'torch', 'matplotlib'} & sys.modules.keys(); "
        "print(qkv.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == qkv.__version__


@pytest.mark.slow
def test_service_needs_no_matplotlib(tmp_path: Path) -> None:
    """A process that has imported all of a service has not imported it, and then finds none."""
    code = (
        "import sys; assert 'qkv.api.app' in sys.modules; assert 'matplotlib' not in sys.modules; "
        "sys.modules['matplotlib'] = None; from qkv.api.app import create_app; "
        "from qkv.api.endpoints.variants import entry; from qkv.attention import catalogue; "
        "print(entry(catalogue.find('softmax')).picture)"
    )
    assert run_program(code, tmp_path).strip() == "/v1/variants/softmax/picture"


def test_public_names_are_sorted_and_defined() -> None:
    assert qkv.__all__ == sorted(qkv.__all__)
    assert all(hasattr(qkv, name) for name in qkv.__all__)
