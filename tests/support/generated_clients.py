"""Generators of clients from an OpenAPI document, each in a folder of its own.

Their requirements differ from those of the service, so that they are not installed beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PYTHON_GENERATORS: Final = ("openapi-python-client==0.29.1", "datamodel-code-generator==0.89.0")
NODE_PACKAGES: Final = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3")


@pytest.fixture(scope="session")
def python_generators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of an environment that has the generators for Python."""
    folder = tmp_path_factory.mktemp("generators")
    run(folder, sys.executable, "-m", "venv", "env")
    programs = folder / "env/bin"
    # each program runs once or twice, so that compiling all modules would take longer
    pip = (programs / "python", "-m", "pip", "-q", "install", "--no-compile")
    run(folder, *pip, *PYTHON_GENERATORS)
    return programs


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the generator for TypeScript is installed.

    Skips the tests if npm is not installed.
    """
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module"}')
    run(folder, npm, "install", "--no-audit", "--no-fund", *NODE_PACKAGES)
    return folder


def run(folder: Path, *command: str | Path) -> str:
    """Runs a command in a folder; returns what it writes.

    Raises:
        AssertionError: it fails.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
