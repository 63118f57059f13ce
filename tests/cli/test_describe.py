"""The command `qkv describe`, on a small model of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from census.real_model import build, save
from click.testing import CliRunner

from qkv.cli.main import main
from support.small_checkpoints import load

# building the models imports transformers, which takes seconds
pytestmark = pytest.mark.slow


def run(*words: object) -> tuple[int, str]:
    """Returns the exit status of a command, and what it prints."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.output


def test_described_file_is_what_the_service_reads(tmp_path: Path) -> None:
    save(build("gpt2"), tmp_path)
    code, printed = run("describe", tmp_path, "-o", tmp_path / "qkv.toml")
    assert code == 0, printed
    assert printed.startswith("kind 1: 2 layers, error ")
    assert printed.endswith("up to 64 tokens: h.0, h.1\n")
    loaded = load(tmp_path)
    assert all(loaded.describe(name)["proof"] for name in loaded.names)


def test_layers_without_a_description_are_named(tmp_path: Path) -> None:
    save(build("bloom"), tmp_path)
    code, printed = run("describe", tmp_path, "-o", tmp_path / "qkv.toml")
    assert code == 1
    assert "h.0 is not described: it has no attention call" in printed
    assert not (tmp_path / "qkv.toml").exists()


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        ({"model_type": "mine"}, "qkv.toml", "unknown model type: got 'mine'"),
        ({"model_type": "bert"}, "qkv.json", ".toml"),
    ],
)
def test_mistake_is_one_line(
    tmp_path: Path, config: dict[str, str], target: str, message: str
) -> None:
    save(build("bert"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, printed = run("describe", tmp_path, "-o", tmp_path / target)
    assert code == 1
    assert message in printed
    assert printed.count("\n") == 1
