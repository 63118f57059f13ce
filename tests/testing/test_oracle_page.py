"""Tests that docs/oracle.md is true and complete."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy

from qkv.testing import KNOWN_BUGS, verify
from qkv.testing.known_bugs import LOW_PRECISION
from support.commands import stdout_of
from support.compiled_kernel import Command
from support.compiled_kernel import kernel as kernel
from support.paths import ROOT

FLAGS = re.MULTILINE | re.DOTALL
PAGE = (ROOT / "docs/oracle.md").read_text()


@pytest.mark.slow
def test_examples_run() -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    runnable = [text for text in examples if "pytest" not in text]  # test_pytest_plugin has those
    assert len(runnable) == 2
    for example in runnable:
        exec(example, {"__name__": "example"})


@pytest.mark.slow
def test_program_prints_the_documented_report(kernel: Command, tmp_path: Path) -> None:
    ((script, documented),) = re.findall(r"^```sh\n(.*?)^```\n\n```\n(.*?)^```$", PAGE, FLAGS)
    compilation, _, verification = script.partition("\n")
    assert compilation.startswith("c++ ")
    assert "tests/support/attention_kernel.cpp -o my_kernel" in compilation
    (tmp_path / "my_kernel").symlink_to(shlex.split(kernel())[0])
    done = subprocess.run(
        ["bash", "-c", verification],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    printed, expected = (re.sub(r"\d[\d.e+-]*", "N", text) for text in (done.stdout, documented))
    assert printed == expected


def test_layout_of_a_case_is_that_of_the_page(tmp_path: Path) -> None:
    (command,) = re.findall(r"^qkv (oracle .*) -o case.safetensors$", PAGE, re.MULTILINE)
    (fields,) = re.findall(r'^(\{"parameters".*)$', PAGE, re.MULTILINE)
    case = tmp_path / "case.safetensors"
    stdout_of(*command.split(), "-o", case)
    with safetensors.safe_open(case, framework="np") as file:
        assert file.metadata() == {"qkv": fields}
    (entry,) = re.findall(r'`("query":\{.*?\})`', PAGE)
    assert entry.encode() in case.read_bytes()
    assert set(safetensors.numpy.load_file(case)) <= set(re.findall(r"^\| `(\w+)`", PAGE, FLAGS))


def test_every_known_bug_is_on_the_page() -> None:
    listed = set(re.findall(r"`([a-z-]+)`", PAGE.partition("## The diagnosis")[2]))
    assert {*KNOWN_BUGS, LOW_PRECISION} <= listed


def test_every_option_is_on_the_page() -> None:
    kinds = inspect.signature(verify).parameters.values()
    options = {p.name for p in kinds if p.kind is p.KEYWORD_ONLY}
    assert options <= set(re.findall(r"`(\w+)`", PAGE.partition("## The report")[0]))


def test_script_over_http_gets_the_verdict_on_the_page(url: str, tmp_path: Path) -> None:
    page = PAGE.partition("## Over HTTP")[2]
    (script,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script.replace("http://127.0.0.1:8000", url)],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    verdict = json.loads(done.stdout)
    for name in ("passed", "diagnosis"):
        assert f'"{name}": {json.dumps(verdict[name])}' in page
