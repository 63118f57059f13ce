"""Tests of the command line as users and process managers run it: real processes and signals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

import qkv
from qkv.cli.main import main
from support.commands import stdout_of
from support.ports import free_port
from support.processes import TIMEOUT_S, Process
from support.service import Server

EXPECTED = [[1.6605, 2.6605], [2.3395, 3.3395]]  # output of the printed curl command
Command = Callable[..., Process]


def rounded(response: Any) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in response["outputs"]["output"]]


@pytest.mark.representative
def test_serve_prints_its_address_and_a_working_curl_command(process: Process) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", process.url)
    assert any(f"on {process.url} (cpu" in line for line in process.lines[:-1])
    words = shlex.split(process.lines[-1])
    assert words[0] == "curl"
    if shutil.which("curl"):
        done = subprocess.run(
            [*words, "--silent", "--show-error"], capture_output=True, text=True, check=True
        )
        assert rounded(json.loads(done.stdout)) == EXPECTED
    body = words[words.index("--json") + 1]
    response = httpx.post(words[1], content=body, headers={"Content-Type": "application/json"})
    assert rounded(response.json()) == EXPECTED


@pytest.mark.slow
def test_flags_override_the_environment_and_sigterm_exits_with_0(command: Command) -> None:
    port, other = str(free_port()), str(free_port())
    arguments = ("serve", "--port", port, "--host", "127.0.0.2")
    served = command(*arguments, QKV_PORT=other, QKV_HOST="127.0.0.3")
    assert served.url == f"http://127.0.0.2:{port}"
    assert httpx.get(f"{served.url}/readyz").is_success
    assert served.end(signal.SIGTERM) == 0
    assert served.is_serving  # the last printed line: no traceback, no warning


def test_environment_sets_other_settings_and_sigint_exits_with_0(command: Command) -> None:
    port = free_port()
    served = command("serve", QKV_PORT=str(port), QKV_MAX_BODY_BYTES="50", QKV_MAX_BATCH="8")
    assert served.url == f"http://127.0.0.1:{port}"
    response = httpx.post(f"{served.url}/v1/attention/softmax", content=b" " * 51)
    assert response.status_code == 413
    assert response.json()["limit"] == 50
    assert served.end(signal.SIGINT) == 0
    assert served.is_serving


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {"QKV_PORT": "http"}, ["QKV_PORT", "http"]),
        ((), {"QKV_PORT": "65536"}, ["QKV_PORT", "65536"]),
        (("--port", "-1"), {}, ["port", "-1"]),
        (("--port", "70000"), {"QKV_PORT": "0"}, ["port", "70000"]),
        ((), {"QKV_DEVICE": "tpu"}, ["QKV_DEVICE", "tpu", "cpu"]),
        ((), {"QKV_MAX_BATCH": "-1"}, ["QKV_MAX_BATCH", "-1"]),
        ((), {"QKV_MAX_BODY_BYTES": "256MB"}, ["QKV_MAX_BODY_BYTES", "256MB"]),
        ((), {"QKV_THREADS": "1.5"}, ["QKV_THREADS", "1.5"]),
        ((), {"QKV_READ_TIMEOUT_S": "inf"}, ["QKV_READ_TIMEOUT_S", "inf", "finite"]),
        ((), {"QKV_ALLOWED_HOSTS": "a.example:80"}, ["QKV_ALLOWED_HOSTS", "without a port"]),
        ((), {"QKV_ALLOWED_HOSTS": ".example"}, ["QKV_ALLOWED_HOSTS", "'.example'"]),
        ((), {"QKV_WORKER": "3"}, ["QKV_WORKER is", "QKV_WORKERS?"]),
        ((), {"qkv_max_bodybytes": "3"}, ["qkv_max_bodybytes", "QKV_MAX_BODY_BYTES?"]),
        (
            ("--port", "-1"),
            {"QKV_URL": "http://127.0.0.1"},
            ["port", "-1"],
        ),  # a variable of the client
        (("--port", "-1"), {"QKV_API_KEY": "a"}, ["port", "-1"]),
    ],
)
def test_wrong_setting_is_one_line(
    arguments: tuple[str, ...], environment: dict[str, str], expected: list[str]
) -> None:
    failed = CliRunner().invoke(main, ["serve", *arguments], env=environment)
    assert failed.exit_code == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("Error: ")
    assert all(word in line for word in expected), line


def test_unusable_address_is_one_line(command: Command, server: Server) -> None:
    _, taken = server.address
    port = command("serve", "--port", str(taken))
    host = command("serve", "--port", "0", "--host", "192.0.2.1")  # reserved: RFC 5737
    name = command("serve", "--port", "0", "--host", "nosuch.invalid")
    none = command("serve", "--port", "0", "--host", f"{'a' * 64}.invalid")
    for failed, expected in (
        (port, ["in use", str(taken)]),
        (host, ["192.0.2.1"]),
        (name, ["cannot listen on nosuch.invalid:0: "]),
        (none, [".invalid:0: "]),
    ):
        assert failed.wait() == 1
        (line,) = failed.lines
        assert line.startswith("Error: cannot listen on ")
        assert all(word in line for word in expected), line
        assert "attempting" not in line


def test_unknown_or_mistyped_flag_is_one_line(command: Command) -> None:
    for arguments in (("serve", "--port", "http"), ("serve", "--threads", "2"), ("served",)):
        failed = command(*arguments)
        assert failed.wait() == 2
        (line,) = failed.lines
        assert line.startswith("Error: ")
        assert any(word in line for word in arguments[1:] or arguments)
    bare = command()
    assert bare.wait() == 2
    assert "Usage: " in bare.lines[0]


def run(*words: str) -> str:
    """Runs a command that succeeds; returns its stdout."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.process
def test_help_and_version_are_printed() -> None:
    module = (sys.executable, "-m", "qkv")
    text = run(*module, "--help")
    assert text.startswith("Usage: ")
    assert "serve" in text
    text = run(*module, "serve", "--help")
    assert all(word in text for word in ("--host", "QKV_PORT", "8000", "QKV_DEVICE"))
    assert "docs/" not in text  # a reader of the help may have no clone
    for words in ((), ("serve",)):
        assert stdout_of(*words, "-h") == stdout_of(*words, "--help")
    version = run(*module, "--version")
    assert qkv.__version__ in version
    script = Path(sys.executable).with_name("qkv")
    if script.exists():
        assert run(str(script), "--version") == version


def test_wrong_setting_is_reported_before_torch_is_imported() -> None:
    program = (
        "import sys; sys.modules.update(torch=None); from qkv.cli.main import main;"
        "main(['serve', '--port', '70000'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "70000" in done.stderr


def test_serve_without_the_server_extra_names_the_command_to_install_it() -> None:
    """The base install has the command, but not the service."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'fastapi')));"
        "from qkv.cli.main import main; main(['serve'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install '.[server]'" in line
