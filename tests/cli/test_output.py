"""Tests of what commands print of files: no control characters, and valid JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import error_of, normal, stdout_of, write_tensors
from support.processes import TIMEOUT_S

# sets the title of the terminal, by a C0 and by a C1 control; then reverses the text
HOSTILE = "a\x1b]0;title\x07\x9d0;title\x9c\u202eb"
ESCAPED = r"a\u001b]0;title\u0007\u009d0;title\u009c\u202eb"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Writes a layer below a hostile name, and returns its path."""
    arrays = {f"{HOSTILE}.W_{r}": normal(6, 4, seed=n) for n, r in enumerate(("query", "key"))}
    arrays |= {f"{HOSTILE}.W_value": normal(6, 4), f"{HOSTILE}.{HOSTILE}": normal(2)}
    return write_tensors(tmp_path / "in.safetensors", "tensors", arrays)


def test_names_in_tables_and_lines_are_escaped(model: Path, tmp_path: Path) -> None:
    convert = ("convert", model, "--to", "v2", "-o", tmp_path / "out.npz", "--local")
    for words in (("layers", model), convert):
        printed = stdout_of(*words)
        assert ESCAPED in printed
        assert all(c == "\n" or c.isprintable() for c in printed)


@pytest.mark.slow
def test_names_in_errors_are_escaped(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    words = ("convert", model, "--to", "v2", "-o", target, "--prefix", HOSTILE)
    line = error_of(tmp_path, *words, QKV_URL="http://127.0.0.1:1")  # no service is there
    assert line.isprintable()
    wrong = write_tensors(tmp_path / "xy.safetensors", "tensors", {HOSTILE: normal(2)})
    line = error_of(tmp_path, "detect", model, "--check", wrong, "--local")
    assert line.isprintable()
    path = tmp_path / f"{HOSTILE.replace('/', '')}.safetensors"
    assert ESCAPED in error_of(tmp_path, "layers", path)


def test_json_has_the_names_as_they_are(model: Path) -> None:
    printed = stdout_of("layers", model, "--json")
    assert all(c == "\n" or c.isprintable() for c in printed)
    assert json.loads(printed)[0]["prefix"] == HOSTILE


def test_error_of_a_process_is_escaped(tmp_path: Path) -> None:
    """The whole program prints it, not a test's runner."""
    done = subprocess.run(
        [sys.executable, "-m", "qkv", "layers", HOSTILE],
        cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert b"\x1b" not in done.stderr
    assert ESCAPED.encode() in done.stderr
