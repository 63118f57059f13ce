"""Tests of reading checkpoints: one file, several with an index, folders, damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from qkv.errors import InvalidContent
from qkv.wire.checkpoint.checkpoint import Checkpoint
from support.checkpoints import llama, write_raw
from support.commands import error_of, stdout_of


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    llama(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def edit_index(sharded: Path, folder: Path, **weight_map: Any) -> Path:
    """Writes a copy of an index with other entries, beside links to its files."""
    for path in sharded.glob("*.safetensors"):
        (folder / path.name).symlink_to(path)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"] |= weight_map
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def test_index_and_folder_have_every_tensor_of_the_model(sharded: Path) -> None:
    state = llama(torch.bfloat16).state_dict()
    for path in (sharded, sharded / "model.safetensors.index.json"):
        checkpoint = Checkpoint(path)
        assert set(checkpoint.names) == state.keys()
        for name, tensor in state.items():
            assert checkpoint.shape(name) == tensor.shape
            assert checkpoint.dtype(name) == "bfloat16"
            bits = tensor.view(torch.int16).numpy()
            assert checkpoint.read(name).numpy().tobytes() == bits.tobytes()
            assert checkpoint.read(name).numpy().dtype == ml_dtypes.bfloat16


def test_layers_are_in_numeric_order(sharded: Path) -> None:
    norms = [n for n in Checkpoint(sharded).names if n.endswith("input_layernorm.weight")]
    assert norms == [f"model.layers.{i}.input_layernorm.weight" for i in range(12)]


def test_links_as_in_a_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    index = edit_index(sharded, tmp_path)
    assert Checkpoint(index).read("lm_head.weight").shape == (20, 32)


def test_only_the_needed_files_must_exist(sharded: Path, tmp_path: Path) -> None:
    path = edit_index(sharded, tmp_path)
    names = json.loads(path.read_text())["weight_map"]
    needed = {f for n, f in names.items() if n.startswith("model.layers.3.self_attn.")}
    for name in set(names.values()) - needed:
        (tmp_path / name).unlink()
    target = tmp_path / "out.safetensors"
    words = ("convert", path, "--to", "meta", "--heads", "4", "-o", target, "--local")
    stdout_of(*words, "--prefix", "model.layers.3.self_attn")
    missing = names["model.layers.9.self_attn.q_proj.weight"]
    line = error_of(tmp_path, *words, "--prefix", "model.layers.9.self_attn")
    assert f"a file of the index is missing: got no {missing} beside it" in line
    assert str(path) in line


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", "C:\\x.safetensors", "..\\x.safetensors", "", 3, None,
     ["a"], "a/../../b.safetensors", "a\0.safetensors", "model.json"],
)  # fmt: skip
def test_file_outside_the_folder_is_refused(sharded: Path, tmp_path: Path, name: object) -> None:
    path = edit_index(sharded, tmp_path, **{"lm_head.weight": name})
    for words in (("layers",), ("convert", "--to", "v1", "-o", str(tmp_path / "o.npz"))):
        assert "weight_map is wrong at lm_head.weight" in error_of(tmp_path, *words, path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert str(path) in error_of(tmp_path, "layers", path)


def test_index_with_a_name_that_its_file_lacks_is_named(sharded: Path, tmp_path: Path) -> None:
    names = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    path = edit_index(sharded, tmp_path, extra=names["lm_head.weight"])
    assert "extra is not in model-" in error_of(tmp_path, "layers", path)


def test_folder_without_a_model_or_with_several_is_an_error(tmp_path: Path) -> None:
    assert "directory without a .safetensors file" in error_of(tmp_path, "layers", tmp_path)
    for name in ("b.safetensors", "a.safetensors"):
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / name)
    line = error_of(tmp_path, "layers", tmp_path)
    assert "has 2 models: got a.safetensors, b.safetensors; name one of them" in line
    (tmp_path / "a.safetensors").rename(tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).names == ["x"]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1234567")
    line = error_of(tmp_path, "layers", path)
    assert line.startswith(f"Error: {path}: not a safetensors file: ")
    assert f"{tmp_path / 'none.safetensors'}: No such file" in error_of(
        tmp_path, "layers", tmp_path / "none.safetensors"
    )


def test_dtypes_that_requests_do_not_have_are_read_as_their_codes(tmp_path: Path) -> None:
    codes = {"U8": 1, "I32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F64": 8}
    header, end = {}, 0
    for code, size in codes.items():
        header[code] = {"dtype": code, "shape": [1], "data_offsets": [end, end + size]}
        end += size
    checkpoint = Checkpoint(write_raw(tmp_path / "a.safetensors", header, b"\0" * end))
    dtypes = {name: checkpoint.dtype(name) for name in codes}
    assert dtypes == {n: n for n in codes} | {"BF16": "bfloat16", "F64": "float64"}
    assert checkpoint.read("F64").numpy() == np.zeros(1)
    with pytest.raises(InvalidContent, match="U8 has an unknown dtype"):
        checkpoint.read("U8")


def test_headers_of_a_checkpoint_are_bounded_together(tmp_path: Path) -> None:
    """Links to one file are one file, whose header is read once."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    metadata = {"a": "x" * (9 << 20)}
    weight_map, files = dict[str, str](), []
    for i in range(4):
        header = {"__metadata__": metadata, f"{i}": entry}
        files.append(write_raw(tmp_path / f"{i}.safetensors", header, size=4))
        weight_map[f"{i}"] = files[-1].name
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(index)
    assert [checkpoint.shape(f"{i}") for i in range(3)] == [(1,)] * 3
    with pytest.raises(
        InvalidContent, match=r"too long: expected at most \d+ bytes of the 33554432"
    ):
        checkpoint.shape("3")
    for i, link in ((1, os.symlink), (2, os.link), (3, os.symlink)):
        files[i].unlink()
        link(files[0], files[i])
    entries = {f"{i}": entry | {"data_offsets": [4 * i, 4 * i + 4]} for i in range(4)}
    write_raw(files[0], {"__metadata__": metadata} | entries, size=16)
    checkpoint = Checkpoint(index)
    assert [checkpoint.shape(f"{i}") for i in range(4)] == [(1,)] * 4
