"""Commands that run attention here take the variants of the folder `QKV_VARIANTS`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from qkv.attention import variant_file
from support.commands import normal, one_error, read_tensors, write_tensors
from support.processes import run_command

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with one variant, `cosine`."""
    (path := tmp_path / "own").mkdir()
    (path / "cosine.py").write_text(variant_file.example())
    return path


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in another process: the catalogue of this one stays as it is."""
    return run_command(*words, QKV_VARIANTS=str(folder))


@pytest.mark.representative
def test_list_has_the_variants_of_the_folder(folder: Path) -> None:
    done = run(folder, "variants", "--local")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "softmax" in names
    assert "cosine" in names
    assert names == sorted(names)


def test_variant_of_the_folder_runs_and_is_judged(folder: Path, tmp_path: Path) -> None:
    """The results of a run are right for the case of the same variant."""
    case, results = tmp_path / "case.safetensors", tmp_path / "out.safetensors"
    assert run(folder, "oracle", "cosine", "-o", case).returncode == 0
    assert run(folder, "attend", "cosine", case, "-o", results, "--local").returncode == 0
    assert np.isfinite(read_tensors(results)["output"]).all()
    done = run(folder, "verify", "cosine", case, results)
    assert done.returncode == 0, done.stdout + done.stderr


def test_broken_file_is_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.py").write_text("attend = 3\n")
    arrays = {name: normal(1, 1, 2, 2) for name in ("query", "key", "value")}
    source = write_tensors(tmp_path / "in.npz", "inputs", arrays)
    done = run(folder, "attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    assert done.returncode == 1
    assert f"{folder / 'broken.py'} is no variant: " in one_error(done.stderr)


def test_requests_to_a_service_need_no_folder(folder: Path) -> None:
    """The service has its own; the command does not even read the variable."""
    (folder / "broken.py").write_text("attend = 3\n")
    done = run(folder, "variants", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no response from" in one_error(done.stderr)
