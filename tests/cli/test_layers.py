"""Tests of `qkv layers`: the table and the JSON for real models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from support.checkpoints import gpt2, llama, write_raw
from support.commands import error_of, stdout_of, write_tensors


def test_table_has_a_line_for_each_layer(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    printed = stdout_of("layers", tmp_path)
    head, rule, blank, title, *rows = printed.splitlines()
    names = ["layer", "layout", "hidden", "query", "key", "output", "biases", "norms"]
    assert head.split() == names
    assert set(rule) == {"─"}
    assert (blank, title) == ("", f"12 attention layers in {tmp_path.name}")
    assert [row.split() for row in rows] == [
        [f"model.layers.{i}.self_attn", "llama", "32", "32", "16", "32", "–", "–"]
        for i in range(12)
    ]
    assert len({len(row) for row in rows}) == 1  # the columns are aligned


def test_json_has_the_sizes(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        num_hidden_layers=1, vocab_size=20, intermediate_size=16,
    )  # fmt: skip
    transformers.Qwen3Model(config).save_pretrained(tmp_path)
    (layer,) = json.loads(stdout_of("layers", tmp_path, "--json"))
    expected = {
        "layouts": ["llama"], "hidden_width": 32, "query_width": 64, "key_width": 16,
        "value_width": 16, "output_width": 32, "biases": [], "norms": ["query", "key"],
        "problem": "",
    }  # fmt: skip
    assert expected == {name: layer[name] for name in expected}


def test_gpt2_has_all_biases(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    printed = stdout_of("layers", tmp_path / "model.safetensors")
    assert printed.splitlines()[-1].split()[-2:] == ["all", "–"]
    assert "2 attention layers in model.safetensors" in printed


@pytest.mark.parametrize("suffix", [".npz", ".json", ".safetensors"])
def test_layer_without_a_prefix_is_listed(tmp_path: Path, suffix: str) -> None:
    arrays = {f"W_{r}.weight": np.ones((4, 6), "f4") for r in ("query", "key", "value")}
    path = write_tensors(tmp_path / f"v2{suffix}", "tensors", arrays)
    row = stdout_of("layers", path).splitlines()[-1]
    assert row.split() == ["(no", "prefix)", "v2", "6", "4", "4", "–", "–", "–"]


def test_only_headers_are_read(tmp_path: Path) -> None:
    """The file has a hole of 2 TiB in place of the weights."""
    width = 1 << 18
    size = width * width * 2
    header = {
        f"layers.0.self_attn.{r}_proj.weight": {
            "dtype": "BF16", "shape": [width, width], "data_offsets": [i * size, (i + 1) * size],
        }
        for i, r in enumerate("qkvo")
    }  # fmt: skip
    path = write_raw(tmp_path / "model.safetensors", header, size=4 * size)
    (layer,) = json.loads(stdout_of("layers", path, "--json"))
    assert layer["hidden_width"] == layer["key_width"] == width


def test_file_without_a_layer_is_an_error_or_an_empty_list(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.safetensors", "tensors", {"x": np.ones((2, 2), "f4")})
    assert f"{path} has no attention layer: got 'x'" in error_of(tmp_path, "layers", path)
    assert stdout_of("layers", path, "--json") == "[]\n"


def test_layer_with_a_problem_is_listed_with_the_reason(tmp_path: Path) -> None:
    arrays = {f"{r}_proj.weight": np.ones((4, 6), "f4") for r in "qk"}
    path = write_tensors(tmp_path / "a.npz", "tensors", arrays)
    printed = stdout_of("layers", path)
    assert "v_proj.weight or v_lin.weight is missing" in printed


def test_file_needs_no_service(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.npz", "tensors", {"c_attn.weight": np.ones((4, 12), "f4")})
    assert "gpt2" in stdout_of("layers", path, "--url", "http://127.0.0.1:1")
