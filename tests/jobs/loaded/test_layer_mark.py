"""Layers that `qkv describe` described: their mark, and what takes it away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from support.described_checkpoints import BLOCKS, FIELDS, PROOF, described_bert
from support.small_checkpoints import BERT, BYTES, bert_tensors, load, problem_of, write


def proofs_of(folder: Path) -> list[Any]:
    """Returns the proof of each layer."""
    loaded = load(folder)
    return [loaded.describe(name)["proof"] for name in loaded.names]


def test_described_layers_have_their_proof_and_their_length(tmp_path: Path) -> None:
    loaded = load(described_bert(tmp_path))
    described = [loaded.describe(name) for name in loaded.names]
    assert loaded.names == [f"small.{block}" for block in BLOCKS]
    assert [layer["proof"] for layer in described] == [PROOF, PROOF]
    assert [layer["max_length"] for layer in described] == [6, 6]
    assert described[0]["parameters"] == {}


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("causal = false", "causal = true"),
        ("error = 2.5e-07", "error = 1e-09"),
        ("length = 6", "length = 60"),
        ('torch = "2.13.0"', 'torch = "2.14.0"'),
    ],
)
def test_changed_line_loses_the_mark(tmp_path: Path, line: str, other: str) -> None:
    described_bert(tmp_path)
    file = tmp_path / "qkv.toml"
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, other))
    loaded = load(tmp_path)
    layer = loaded.describe(loaded.names[0])
    assert layer["proof"] is None
    assert layer["max_length"] is None
    assert layer["parameters"] == ({"causal": True} if other == "causal = true" else {})


def test_line_by_hand_replaces_that_of_a_kind(tmp_path: Path) -> None:
    described_bert(tmp_path)
    file = tmp_path / "qkv.toml"
    file.write_text(file.read_text() + '\n[layers."encoder.layer.1"]\ncausal = true\n')
    assert proofs_of(tmp_path) == [PROOF, None]
    loaded = load(tmp_path)
    assert loaded.describe(loaded.names[1])["parameters"] == {"causal": True}


def test_other_shapes_lose_the_mark(tmp_path: Path) -> None:
    described_bert(tmp_path)
    tensors = bert_tensors()
    del tensors["encoder.layer.0.attention.self.key.bias"]
    write(tmp_path, tensors)
    assert proofs_of(tmp_path) == [None, PROOF]


def test_allowing_longer_requests_keeps_the_mark(tmp_path: Path) -> None:
    loaded = load(described_bert(tmp_path, "longer = true"))
    layer = loaded.describe(loaded.names[0])
    assert layer["proof"] == PROOF
    assert layer["max_length"] is None


def test_described_layers_need_no_known_configuration(tmp_path: Path) -> None:
    """What a description says was measured, and config.json is not asked."""
    config = BERT | {"model_type": "unknown", "position_embedding_type": "relative_key"}
    assert proofs_of(described_bert(tmp_path, config=config)) == [PROOF, PROOF]


def test_block_of_no_layer_is_refused(tmp_path: Path) -> None:
    folder = described_bert(tmp_path / "bad")
    file = folder / "qkv.toml"
    file.write_text(file.read_text().replace('"encoder.layer.1"]', '"encoder.layer.7"]'))
    assert 'block "encoder.layer.7" of [kinds] is used by no layer' in problem_of(folder)


@pytest.mark.parametrize("kinds", ["kinds = 1", "[kinds.1]\nheads = 4", "[kinds.1]\nblocks = [1]"])
def test_kinds_without_blocks_are_refused(tmp_path: Path, kinds: str) -> None:
    folder = described_bert(tmp_path / "bad")
    (folder / "qkv.toml").write_text(kinds)
    assert "kinds is wrong" in problem_of(folder)


def test_layers_by_hand_have_no_proof(tmp_path: Path) -> None:
    described_bert(tmp_path)
    (tmp_path / "qkv.toml").write_text(f"causal = {str(FIELDS['causal']).lower()}\n")
    assert proofs_of(tmp_path) == [None, None]


def test_described_layers_are_served_beside_others_of_their_stack(tmp_path: Path) -> None:
    """A layer of config.json or by hand may need what the first block has, a described one not."""
    described_bert(tmp_path, config=BERT | {"model_type": "unknown"})
    file = tmp_path / "qkv.toml"
    file.write_text(file.read_text().replace('"encoder.layer.0", ', ""))
    (checkpoint,) = load_checkpoints({"small": tmp_path}, BYTES).checkpoints
    assert list(checkpoint.layers) == ["small.encoder.layer.1"]
    assert "causal" in checkpoint.unserved["encoder.layer"]
