"""Tests of the refusal of files of `torch.save`, and of the command in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.checkpoints import gpt2
from support.commands import error_of, stdout_of

COMMANDS: dict[str, tuple[str, ...]] = {
    "attend": ("attend", "softmax", "-o", "out.npz"),
    "gradients": ("gradients", "softmax", "-o", "out.npz"),
    "compare": ("compare", "softmax"),
    "convert": ("convert", "--to", "v1", "-o", "out.npz"),
    "detect": ("detect", "--check", "xy.npz"),
    "layers": ("layers",),
}


@pytest.mark.parametrize(
    ("command", "suffix"),
    [*((command, ".pt") for command in COMMANDS)]
    + [("layers", suffix) for suffix in (".pth", ".bin", ".ckpt")],
)
def test_every_command_refuses_a_pickle(tmp_path: Path, command: str, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"x": torch.ones(2)}, path)
    name, *words = COMMANDS[command]
    if name in ("attend", "gradients", "compare"):
        words.insert(1, str(path))
    else:
        words.insert(0, str(path))
    line = error_of(tmp_path, name, *words)
    assert f"{path} is a pickle" in line
    assert "python -c " in line


NAMES = ["model.pt", "with space.pth", "it's.bin", 'a "quoted" $HOME.ckpt', "bäume.pt"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_the_printed_command_makes_a_safetensors_file(
    tmp_path: Path, name: str, key: str | None
) -> None:
    """Also of tensors below a key; lm_head shares its memory with the embedding."""
    state = gpt2().state_dict()
    path = tmp_path / name
    torch.save({key: state, "epoch": 3, "optimizer": {"lr": 0.1}} if key else state, path)
    exec(program_of(printed_command(tmp_path, path)), {})
    assert_is_converted(path, state)


@pytest.mark.slow
def test_the_printed_command_runs_in_a_shell(tmp_path: Path) -> None:
    state = gpt2().state_dict()
    torch.save(state, tmp_path / NAMES[3])
    command = printed_command(tmp_path, tmp_path / NAMES[3])
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-c", command], check=True, capture_output=True, env=os.environ | python
    )
    assert_is_converted(tmp_path / NAMES[3], state)


def printed_command(folder: Path, path: Path) -> str:
    line = error_of(folder, "layers", path)
    return line[line.index("python -c ") :]


def program_of(command: str) -> str:
    """Returns the program that a shell hands to `python`; to start it takes two seconds."""
    shell = f'python() {{ printf %s "$2"; }}; {command}'
    done = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True)
    return done.stdout


def assert_is_converted(path: Path, state: dict[str, Any]) -> None:
    target = path.with_suffix(".safetensors")
    written = safetensors.torch.load_file(target)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[n], t) for n, t in state.items())
    assert "transformer.h.1.attn" in stdout_of("layers", target)


def test_folder_and_index_of_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    line = error_of(tmp_path, "layers", tmp_path)
    assert f"{tmp_path / 'pytorch_model.bin'} is a pickle" in line
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"x": "pytorch_model.bin"}}')
    assert "pytorch_model.bin is a pickle" in error_of(tmp_path, "layers", index)
