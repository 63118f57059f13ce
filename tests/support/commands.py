"""Runs commands in this process, and prepares the files that they read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from qkv.cli.main import main
from support.known_requests import Array, as_array, as_json

SUFFIXES: Final = (".safetensors", ".npz", ".json")
TARGETS: Final = ("service", "local")


def invoke(*words: object, **environment: str) -> Result:
    """Runs a command in 80 columns; returns its output and exit status."""
    return CliRunner().invoke(
        main, [str(word) for word in words], env=environment, terminal_width=80
    )


def stdout_of(*words: object, **environment: str) -> str:
    """Returns the output of a command, which must succeed."""
    done = invoke(*words, **environment)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout


def error_of(folder: Path, *words: object, **environment: str) -> str:
    """Returns the one error line of a command, which must fail and change no file."""
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    done = invoke(*words, **environment)
    assert isinstance(done.exception, SystemExit), done.exception  # no traceback
    assert done.exit_code != 0
    assert done.stdout == ""
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    return one_error(done.stderr)


def one_error(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def target_options(place: str, url: str) -> tuple[str, ...]:
    return ("--local",) if place == "local" else ("--url", url)


def write_tensors(path: Path, group: str, arrays: dict[str, Array], **fields: Any) -> Path:
    """Writes a file without the code of the service; a layer is `layer.*` beside inputs."""
    if path.suffix == ".npz":
        assert not fields
        np.savez(path, allow_pickle=False, **arrays)
    elif path.suffix == ".safetensors":
        metadata = {"qkv": json.dumps(fields)} if fields else None
        safetensors.numpy.save_file(arrays, path, metadata)
    else:
        written = {n: as_json(a, fields.get("encoding", "lists")) for n, a in arrays.items()}
        in_layer = {n for n in written if group == "inputs" and n.startswith("layer.")}
        layer = {n.removeprefix("layer."): t for n, t in written.items() if n in in_layer}
        fields[group] = {n: t for n, t in written.items() if n not in in_layer}
        if layer:
            fields["layer"] = fields.get("layer", {}) | {"tensors": layer}
        path.write_text(json.dumps(fields))
    return path


def read_tensors(path: Path, group: str = "outputs") -> dict[str, Array]:
    """Reads a file without the code of the service; lists as float64."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    return {name: as_array(tensor) for name, tensor in json.loads(path.read_text())[group].items()}


def assert_same_bits(ours: dict[str, Array], theirs: Any) -> None:
    """Asserts equal bits, after lists are converted back to their dtype."""
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].shape == array.shape
        assert ours[name].astype(array.dtype).tobytes() == array.tobytes(), name


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tensors() -> dict[str, Any]:
    """Returns inputs with grouped heads, a boolean mask and lengths: every dtype of a file."""
    return {
        "query": normal(2, 4, 5, 8),
        "key": normal(2, 2, 6, 8, seed=1),
        "value": normal(2, 2, 6, 3, seed=2),
        "mask": normal(5, 6, seed=3) > -1,
        "key_lengths": np.array([6, 4]),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Writes a file with inputs of softmax, and returns its path."""
    return write_tensors(tmp_path / "in.json", "inputs", tensors())
