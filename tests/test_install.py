"""`pip install qkv` as a user meets it: a wheel, in an environment of its own, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import qkv
from support.paths import ROOT

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUEST: Final = (
    '{"inputs": {"query": [[1,0],[0,1]], "key": [[1,0],[0,1]], "value": [[1,2],[3,4]]}}'
)


@dataclass(frozen=True)
class Installed:
    """An environment with the base install and nothing else.

    Attributes:
        wheel: what was installed.
        bin: the environment's commands.
        home: an empty folder, where no checkout is on Python's path.
    """

    wheel: Path
    bin: Path
    home: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs one of its commands."""
        return outside(self.home, str(self.bin / words[0]), *words[1:])


def outside(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command there, without what leads Python, mypy or pip back into this environment.

    pip's own settings stay: they say where packages come from.
    """
    led = re.compile(r"PYTHON|MYPY|QKV_|VIRTUAL_ENV|PIP_(TARGET|PREFIX|USER|REQUIRE)")
    environment = {name: value for name, value in os.environ.items() if not led.match(name)}
    # as in the Makefile: pin the build backend too
    pins = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), f"{ROOT}/constraints.txt")
    return subprocess.run(
        words, cwd=folder, env=environment | pins, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds the wheel and installs it, as constraints.txt says."""
    home = tmp_path_factory.mktemp("install")

    def python(*words: str) -> None:
        done = outside(home, sys.executable, "-m", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    python("pip", "wheel", "-q", "--no-deps", "--wheel-dir", "wheels", str(ROOT))
    (wheel,) = (home / "wheels").iterdir()
    python("venv", "--without-pip", "env")  # this environment's pip does for both
    python("pip", "--python", "env/bin/python", "install", "-q", str(wheel))
    (home / "empty").mkdir()
    return Installed(wheel, home / "env/bin", home / "empty")


def packages(requirements: list[str]) -> set[str]:
    """The names in requirements, all written alike."""
    names = [re.split(r"[^\w.-]", text)[0] for text in requirements]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_nothing_of_the_server_is_installed(installed: Installed) -> None:
    words = ("pip", "--python", str(installed.bin / "python"), "list", "--format", "json")
    listed = outside(installed.home, sys.executable, "-m", *words)
    there = packages([package["name"] for package in json.loads(listed.stdout)])
    extras = PROJECT["optional-dependencies"]
    server = packages(extras["server"])
    assert {"torch", "fastapi", "uvicorn", "pydantic"} <= server
    assert not there & (server | packages(extras["dev"]) - {"qkv"})
    assert packages(PROJECT["dependencies"]) | {"qkv"} <= there


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "qkv"],
        cwd=ROOT / "service",
        capture_output=True,
        text=True,
        check=True,
    )
    tracked = {name for name in listed.stdout.split() if (ROOT / "service" / name).exists()}
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = set(wheel.namelist())
    metadata = {name for name in held if ".dist-info/" in name}
    assert held - metadata == tracked
    assert "qkv/py.typed" in held
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_importing_it_imports_no_torch(installed: Installed) -> None:
    program = (
        "import sys, qkv, qkv.cli.main; qkv.Client('http://127.0.0.1:1').close();"
        "assert 'torch' not in sys.modules; print(qkv.__version__, qkv.__file__)"
    )
    done = installed.run("python", "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == qkv.__version__
    assert Path(file).is_relative_to(installed.bin.parent)  # not this checkout's


def test_the_command_is_there(installed: Installed) -> None:
    done = installed.run("qkv", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in ("serve", "attend", "compare", "sweep", "variants"))


def test_the_client_asks_a_service(installed: Installed, url: str) -> None:
    """In numpy's own dtypes and in bfloat16, which ml_dtypes brings; the answer has the dtype."""
    program = """\
import sys
import ml_dtypes, numpy as np, qkv
with qkv.Client(sys.argv[1]) as client:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        x = np.random.default_rng(0).normal(size=(5, 8)).astype(dtype)
        output = client.attend("softmax", query=x, key=x, value=x, scale=1.0).output
        exact = x.astype(np.float64)
        e = np.exp(exact @ exact.T)
        wanted = e / e.sum(-1, keepdims=True) @ exact
        assert type(output) is np.ndarray and output.dtype == dtype, output.dtype
        bound = 8 * float(ml_dtypes.finfo(dtype).eps) * abs(exact).max()
        assert abs(output.astype(np.float64) - wanted).max() < bound, dtype
"""
    done = installed.run("python", "-c", program, url)
    assert done.returncode == 0, done.stderr


def test_the_command_asks_a_service(installed: Installed, url: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(REQUEST)
    done = installed.run("qkv", "attend", "softmax", str(source), "-o", str(target), "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    (first, _) = json.loads(target.read_text())["outputs"]["output"]
    assert first == pytest.approx([1.6605, 2.6605], abs=1e-4)
    done = installed.run("qkv", "variants", "--url", url)
    assert re.search(r"^softmax ", done.stdout, re.MULTILINE), done.stderr


def test_variants_side_by_side_without_torch(
    installed: Installed, url: str, tmp_path: Path
) -> None:
    """The plot is an extra."""
    source = tmp_path / "in.json"
    source.write_text(REQUEST)
    done = installed.run("qkv", "compare", "linear", str(source), "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["softmax", "linear"]
    sweep = ("qkv", "sweep", "linear", "--lengths", "8,16", "--url", url)
    done = installed.run(*sweep)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["length", "linear"]
    done = installed.run(*sweep, "--plot", "out.svg")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'qkv[plot]'" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "serve --port 0",
        "variants --local",
        "attend softmax in.json -o out.json --local",
        "compare linear in.json --local",
        "sweep linear --local",
        "convert in.json -o out.json --from v2 --to v1 --local",
    ],
)
def test_what_needs_the_server_says_so_in_one_line(installed: Installed, words: str) -> None:
    content = (
        REQUEST if "attend" in words or "compare" in words else REQUEST.replace("inputs", "tensors")
    )
    (installed.home / "in.json").write_text(content)
    done = installed.run("qkv", *words.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "pip install 'qkv[server]'" in line


def test_its_types_reach_those_who_use_it(installed: Installed) -> None:
    program = """\
from typing import Any
import numpy as np
from qkv import AsyncClient, Cell, Choice, Client, QkvError

def ask(query: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    with Client("http://127.0.0.1:8000", timeout=None, retries=0) as client:
        try:
            return client.attend("softmax", query=query, key=query, value=query).output
        except QkvError as error:
            return error.status + 1

async def ask_too() -> list[dict[str, Any]]:
    async with AsyncClient() as client:
        return await client.variants()

def side_by_side(query: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    chosen: list[Choice] = ["linear", {"variant": "taylor", "parameters": {"causal": True}}]
    with Client() as client:
        comparison = client.compare(chosen, anchor="softmax", query=query)
        with client.sweep(chosen, [256, 512], heads=4, causal=True) as sweep:
            times: list[float | None] = [cell.median_ms for cell in sweep]
    return comparison.table() + sweep.table() + str(times) + comparison.anchor.variant

async def side_by_side_too() -> list[Cell]:
    async with AsyncClient() as client:
        return [cell async for cell in client.sweep(["softmax"], range(1, 4))]
"""
    wrong = "from qkv import Client\nClient(8000)\nClient().attend(1)\nClient().attent('softmax')\n"
    (installed.home / "right.py").write_text(program)
    (installed.home / "wrong.py").write_text(wrong)
    words = ("mypy", "--strict", "--config-file=", "--python-executable", "../env/bin/python")
    done = outside(installed.home, sys.executable, "-m", *words, "right.py", "wrong.py")
    places = re.findall(r"^(\S+): error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    assert places == [
        ("wrong.py:2", "arg-type"),
        ("wrong.py:3", "arg-type"),
        ("wrong.py:4", "attr-defined"),
    ], done.stdout + done.stderr
