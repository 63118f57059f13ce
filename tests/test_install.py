"""Tests of the built distributions: `make dist`, and the wheel in new environments."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Final

import pytest
import torch

import qkv
from support.paths import ROOT
from support.processes import TIMEOUT_S

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUEST: Final = (
    '{"inputs": {"query": [[1,0],[0,1]], "key": [[1,0],[0,1]], "value": [[1,2],[3,4]]}}'
)


@dataclass(frozen=True)
class Installed:
    """An environment with the installed wheel.

    Attributes:
        wheel: the wheel that is installed.
        sdist: the source distribution that the wheel was built from.
        bin: folder of the environment's commands.
        home: empty folder to run them in, without a checkout on Python's path.
    """

    wheel: Path
    sdist: Path
    bin: Path
    home: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment."""
        return outside(self.home, str(self.bin / words[0]), *words[1:])

    def install(self, *words: str) -> None:
        """Installs packages into the environment."""
        pins = ("-c", f"{ROOT}/constraints.txt")
        python("uv", "-q", "pip", "install", "--python", str(self.bin / "python"), *pins, *words)

    def link_torch(self) -> None:
        """Links the torch of this environment: another index may have a build of several GB."""
        (target,) = self.bin.parent.glob("lib/python*/site-packages")
        distribution = importlib.metadata.distribution("torch")
        for name in {file.parts[0] for file in distribution.files or ()} - {".."}:
            source = Path(str(distribution.locate_file(name)))
            if source.is_dir():
                shutil.copytree(source, target / name, copy_function=link)
            else:
                link(source, target / name)

    def with_server(self) -> Installed:
        """Returns a new environment with the wheel and the extra `server`."""
        home = self.home.parent
        python("uv", "-q", "venv", str(home / "server"))
        environment = Installed(self.wheel, self.sdist, home / "server/bin", self.home)
        environment.link_torch()
        environment.install(f"{self.wheel}[server]")
        return environment


def link(source: str | Path, target: str | Path) -> None:
    """Makes a second name of a file; copies it from another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def clean_environment() -> dict[str, str]:
    """Returns variables for a command, without those that lead Python, mypy or make to this
    environment.

    The package indexes stay.
    """
    own = re.compile(r"PYTHON|MYPY|QKV_|OTEL_|VIRTUAL_ENV|MAKE")
    return {name: value for name, value in os.environ.items() if not own.match(name)}


def outside(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, without the variables of this environment."""
    return subprocess.run(
        words, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
    )


def python(*words: str) -> None:
    """Runs a module of this environment, which must succeed."""
    done = outside(Path("/"), sys.executable, "-m", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def serving(installed: Installed, **environment: str) -> Iterator[str]:
    """Runs `qkv serve` of an environment, which must exit with status 0; yields its URL."""
    process = subprocess.Popen(
        [installed.bin / "qkv", "serve", "--port", "0", "--workers", "1"],
        cwd=installed.home,
        env=clean_environment() | {"QKV_DEVICE": "cpu", "QKV_THREADS": "1"} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("curl "):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        yield lines[-1].split()[1].removesuffix("/v1/attention/softmax")
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0


@contextlib.contextmanager
def trace_collector() -> Iterator[tuple[str, list[str]]]:
    """Accepts traces; yields the URL of the collector and the paths of its requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds both distributions by `make dist` and installs the wheel without extras."""
    home = tmp_path_factory.mktemp("install")
    # -o: never updates the environment that runs the tests.
    words = ("make", "-o", ".venv/.installed", "dist", f"DIST={home / 'dist'}")
    done = outside(ROOT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (home / "dist").glob("*.whl")
    (sdist,) = (home / "dist").glob("*.tar.gz")
    assert len(list((home / "dist").iterdir())) == 2
    (home / "empty").mkdir()
    python("uv", "-q", "venv", str(home / "env"))
    environment = Installed(wheel, sdist, home / "env/bin", home / "empty")
    environment.install(str(wheel))
    return environment


def packages(requirements: list[str]) -> set[str]:
    """Returns the names in requirements, normalised."""
    names = [re.split(r"[^\w.-]", text)[0] for text in requirements]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def package_files() -> set[str]:
    """Returns the files of the package that git does not ignore, relative to service/."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT / "service",
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.split() if (ROOT / "service" / name).exists()}


def test_base_install_has_no_package_of_the_server(installed: Installed) -> None:
    words = ("uv", "pip", "list", "--python", str(installed.bin / "python"), "--format", "json")
    listed = outside(installed.home, sys.executable, "-m", *words)
    found = packages([package["name"] for package in json.loads(listed.stdout)])
    extras = PROJECT["optional-dependencies"]
    server = packages(extras["server"])
    assert {"torch", "fastapi", "uvicorn", "uvloop"} <= server
    assert not found & (server | packages(extras["dev"]) - {"qkv"})
    assert packages(PROJECT["dependencies"]) | {"qkv"} <= found


def test_wheel_has_the_files_of_the_package_and_no_others(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
        (info,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        generator = wheel.read(info).decode()
    metadata = {name for name in names if ".dist-info/" in name}
    bundled = re.compile(r"qkv/playground/([^/]*\.js|[^b/][^/]*/.*)")  # the bundles have them
    assert names - metadata == {name for name in package_files() if not bundled.match(name)}
    assert {"qkv/py.typed", "qkv/attention/variants/pictures/softmax.svg"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in metadata)
    (pin,) = re.findall(r"^hatchling==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"Generator: hatchling {pin}\n" in generator


def test_sdist_has_the_files_of_the_build_and_no_others(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    top = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names == top | {f"service/{name}" for name in package_files()}


def test_distributions_have_the_version_of_the_package(installed: Installed) -> None:
    assert installed.wheel.name == f"qkv-{qkv.__version__}-py3-none-any.whl"
    assert installed.sdist.name == f"qkv-{qkv.__version__}.tar.gz"


def test_import_of_the_base_install_imports_no_torch(installed: Installed) -> None:
    program = (
        "import sys, qkv, qkv.cli.main; qkv.Client('http://127.0.0.1:1').close();"
        "assert 'torch' not in sys.modules; print(qkv.__version__, qkv.__file__)"
    )
    done = installed.run("python", "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == qkv.__version__
    assert Path(file).is_relative_to(installed.bin.parent)  # not the file of this checkout


def test_help_of_the_base_install_lists_the_commands(installed: Installed) -> None:
    done = installed.run("qkv", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in ("serve", "attend", "compare", "sweep", "variants"))


def check_client(installed: Installed, url: str) -> None:
    """Sends a request in each dtype by the Python client of an environment."""
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


def check_command(installed: Installed, folder: Path, *where: str) -> None:
    """Runs `qkv attend` of an environment with `--url URL` or `--local`."""
    source, target = folder / "in.json", folder / "out.json"
    source.write_text(REQUEST)
    done = installed.run("qkv", "attend", "softmax", str(source), "-o", str(target), *where)
    assert (done.returncode, done.stderr) == (0, "")
    (first, _) = json.loads(target.read_text())["outputs"]["output"]
    assert first == pytest.approx([1.6605, 2.6605], abs=1e-4)
    target.unlink()


def check_pytest_plugin(installed: Installed) -> None:
    """Runs a right and a wrong function in the pytest of an environment, which finds the plugin."""
    program = """\
import pytest, torch
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.qkv("softmax", dtype="float32", families=["normal"])

def test_right(qkv_oracle):
    qkv_oracle(scaled_dot_product_attention)

def test_wrong(qkv_oracle):
    qkv_oracle(lambda query, key, value: (query @ key.mT).softmax(-1) @ value)
"""
    (installed.home / "test_kernels.py").write_text(program)
    installed.install("pytest")
    words = ("-m", "pytest", "-q", "--strict-markers", "-W", "error", "test_kernels.py")
    done = installed.run("python", *words)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_kernels.py::test_wrong[float32] - qkv: " in done.stdout


def test_client_of_the_base_install_returns_the_dtype_of_the_request(
    installed: Installed, url: str
) -> None:
    check_client(installed, url)


def test_command_of_the_base_install_uses_a_service(
    installed: Installed, url: str, tmp_path: Path
) -> None:
    check_command(installed, tmp_path, "--url", url)
    done = installed.run("qkv", "variants", "--url", url)
    assert re.search(r"^softmax ", done.stdout, re.MULTILINE), done.stderr


def test_base_install_compares_and_sweeps_but_does_not_plot(
    installed: Installed, url: str, tmp_path: Path
) -> None:
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
    assert "pip install '.[plot]'" in done.stderr


@pytest.mark.rare(
    "Makefile",
    "Dockerfile",
    "service/qkv_pytest.py",
    "service/qkv/server/startup.py",
    "service/qkv/telemetry/tracing.py",
)
def test_server_and_tracing_extras_run_a_service(installed: Installed, tmp_path: Path) -> None:
    server = installed.with_server()
    program = "from importlib.metadata import version; print(version('torch'))"
    assert server.run("python", "-c", program).stdout.strip() == torch.__version__
    check_command(server, tmp_path, "--local")
    check_pytest_plugin(server)
    with serving(server) as url:
        check_client(installed, url)

    with trace_collector() as (collector, paths):
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}
        with pytest.raises(AssertionError, match=r"\[tracing\]"), serving(server, **endpoint):
            pass
        server.install(f"{server.wheel}[tracing]")
        with serving(server, **endpoint) as url:
            check_command(server, tmp_path, "--url", url)
        assert set(paths) == {"/v1/traces"}


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
def test_command_that_needs_the_server_extra_names_it_in_one_line(
    installed: Installed, words: str
) -> None:
    content = (
        REQUEST if "attend" in words or "compare" in words else REQUEST.replace("inputs", "tensors")
    )
    (installed.home / "in.json").write_text(content)
    done = installed.run("qkv", *words.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "pip install '.[server]'" in line


def test_mypy_checks_a_program_against_the_types_of_the_wheel(installed: Installed) -> None:
    program = """\
from typing import Any
import numpy as np
from qkv import AsyncClient, Cell, Choice, Client, QkvError

def run(query: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    with Client("http://127.0.0.1:8000", timeout=None, retries=0) as client:
        try:
            return client.attend("softmax", query=query, key=query, value=query).output
        except QkvError as error:
            return error.status + 1

async def run_async() -> list[dict[str, Any]]:
    async with AsyncClient() as client:
        return await client.variants()

def compare(query: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    chosen: list[Choice] = ["linear", {"variant": "taylor", "parameters": {"causal": True}}]
    with Client() as client:
        comparison = client.compare(chosen, anchor="softmax", query=query)
        with client.sweep(chosen, [256, 512], heads=4, causal=True) as sweep:
            times: list[float | None] = [cell.median_ms for cell in sweep]
    return comparison.table() + sweep.table() + str(times) + comparison.anchor.variant

async def compare_async() -> list[Cell]:
    async with AsyncClient() as client:
        return [cell async for cell in client.sweep(["softmax"], range(1, 4))]
"""
    wrong = "from qkv import Client\nClient(8000)\nClient().attend(1)\nClient().attent('softmax')\n"
    (installed.home / "right.py").write_text(program)
    (installed.home / "wrong.py").write_text(wrong)
    words = ("mypy", "--strict", "--config-file=", "--python-executable", "../env/bin/python")
    done = outside(installed.home, sys.executable, "-m", *words, "right.py", "wrong.py")
    errors = re.findall(r"^(\S+): error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    assert errors == [
        ("wrong.py:2", "arg-type"),
        ("wrong.py:3", "arg-type"),
        ("wrong.py:4", "attr-defined"),
    ], done.stdout + done.stderr


@pytest.mark.rare("Makefile", "service/qkv/client/figures", "service/qkv/cli")
def test_plot_extra_plots_a_sweep(installed: Installed, url: str, tmp_path: Path) -> None:
    """It is the last test: the base install of the others has it then."""
    installed.install(f"{installed.wheel}[plot]")
    target = tmp_path / "sweep.svg"
    words = ("sweep", "linear", "--lengths", "8,16", "--url", url, "--plot", str(target))
    done = installed.run("qkv", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<svg" in target.read_text()
