"""Fields of config.json that are not known: refused by name, or passed over by `ignore`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import small_checkpoints
from support.small_checkpoints import (
    BERT,
    LLAMA,
    bert_tensors,
    llama_tensors,
    load,
    problem_of,
)

NAME = "small.model.layers.1"


def write(folder: Path, fields: dict[str, Any], toml: str | None = None) -> Path:
    """Writes a Llama with more fields; returns its folder."""
    return small_checkpoints.write(folder, llama_tensors(), LLAMA | fields, toml)


def test_fields_that_are_not_known_are_named_together(tmp_path: Path) -> None:
    fields = {"unsloth_version": "2025.1", "sliding_window": 4, "vocab_size": 7}
    problem = problem_of(write(tmp_path / "m", fields))
    assert 'got unsloth_version = "2025.1", sliding_window = 4; ' in problem
    assert 'write ignore = ["unsloth_version", "sliding_window"] ' in problem


@pytest.mark.parametrize("table", ["", '[layers."model.layers"]\n'])
def test_ignored_field_is_passed_over_and_listed(tmp_path: Path, table: str) -> None:
    fields = {"unsloth_version": "2025.1", "sliding_window": 4}
    toml = table + 'ignore = ["unsloth_version", "sliding_window"]'
    described = load(write(tmp_path / "m", fields, toml)).describe(NAME)
    assert described["ignored"] == ["unsloth_version", "sliding_window"]
    assert described["parameters"] == {"causal": True}
    assert load(small_checkpoints.llama(tmp_path / "plain")).describe(NAME)["ignored"] == []


def test_ignored_field_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    problem = problem_of(write(tmp_path / "m", {}, 'ignore = ["unsloth_version"]'))
    assert 'ignore = ["unsloth_version"] is used by no layer: expected a field of config' in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None},
        {"rope_scaling": None, "pretraining_tp": 2, "torch_dtype": "float16"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"position_embedding_type": "absolute", "is_decoder": False, "pruned_heads": {}},
    ],
)
def test_field_that_changes_nothing_or_is_read_is_accepted(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    assert load(write(tmp_path / "m", fields)).describe(NAME)["ignored"] == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            "mrope_section",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}}, "new"),
        ({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}, "partial_rotary_"),
    ],
)
def test_value_that_may_matter_is_refused(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    assert f"got {named}" in problem_of(write(tmp_path / "m", fields))


def test_fields_of_the_files_of_older_models_are_known(tmp_path: Path) -> None:
    """Fields of bert-base-uncased and of albert-base-v2."""
    older = {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
        "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522, "down_scale_factor": 1,
        "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0,
    }  # fmt: skip
    assert load(small_checkpoints.write(tmp_path / "b", bert_tensors(), BERT | older)).names
