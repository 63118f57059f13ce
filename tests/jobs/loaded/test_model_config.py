"""`config.json` of a checkpoint: its fields for each layer, and the problems that it may have."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import save_file

from qkv.errors import InvalidContent
from qkv.jobs.loaded import known_models, model_config
from qkv.jobs.loaded.config_fields import ReadFields
from support import small_checkpoints
from support.small_checkpoints import (
    BERT,
    GEMMA,
    HEADS,
    LLAMA,
    bert_tensors,
    llama_tensors,
    load,
    problem_of,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BERT | {"is_decoder": True}, {"causal": True}),
        (BERT | {"is_decoder": True, "is_causal": False}, {}),
        (BERT | {"is_decoder": False, "architectures": ["BertLMHeadModel"]}, {}),
    ],
)
def test_decoder_is_causal_but_not_its_cross_attention(
    tmp_path: Path, config: Any, expected: Any
) -> None:
    cross = {n.replace("attention", "crossattention"): t for n, t in bert_tensors().items()}
    loaded = load(small_checkpoints.write(tmp_path / "b", bert_tensors() | cross, config))
    own, other = (f"small.encoder.layer.1.{kind}" for kind in ("attention", "crossattention"))
    assert loaded.describe(own)["parameters"] == expected
    assert loaded.describe(other)["parameters"] == {}


def test_configuration_gives_positions_norms_and_parameters(tmp_path: Path) -> None:
    loaded = load(small_checkpoints.llama(tmp_path / "gemma", GEMMA))
    first, second = (loaded.describe(name) for name in loaded.names)
    assert (first["heads"], first["kv_heads"]) == (HEADS, 2)
    assert first["rope"]["base"] == 100.0
    shared = {"causal": True, "scale": 9**-0.5, "softcap": 2.0}
    assert first["parameters"] == shared
    assert second["parameters"] == shared | {"window": [2, 0]}
    assert first["inputs"] == ["attention", "residual"]
    norm = loaded["small.model.layers.0"].loaded
    assert norm is not None
    assert norm.norm is not None
    assert (norm.norm.numbers.eps, norm.norm.numbers.offset) == (1e-5, 1)
    assert not norm.norm.is_centered


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BERT | {"num_attention_heads": 5}, "heads"),
        (BERT | {"num_attention_heads": 0}, "heads"),
        (BERT | {"hidden_size": 99}, "belongs to another model"),
        (BERT | {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        (BERT | {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        (BERT | {"model_type": "llama", "rope_theta": -1.0}, "rope"),
        ({"model_type": "bert"}, "config.json has no number of heads; write below"),
        ([1, 2], "expected an object"),
        ({"model_type": ["x"], "num_attention_heads": HEADS}, "positions"),
        (BERT | {"model_type": "gpt_neo", "attention_types": [[None, 3]]}, "attention_types is"),
        (GEMMA | {"layer_types": None, "sliding_window_pattern": 0},
         "config.json: sliding_window_pattern is invalid: got 0, expected an integer, 1 or more"),
        (BERT | {"hidden_size": 10**400}, "config.json: hidden_size is invalid: got 1000"),
        (BERT | {"layer_norm_eps": -1.0}, "layer_norm_eps is invalid: got -1.0, expected a number"),
        (BERT | {"num_attention_heads": 2.5}, "is invalid: got 2.5, expected an integer"),
        (GEMMA | {"attn_logit_softcapping": -3.0}, "'softcap' is invalid: got -3.0, expected "),
        (GEMMA | {"sliding_window": 0}, "sliding_window is invalid: got 0, expected 1 or more"),
        (GEMMA | {"sliding_window": None}, "the configuration gives or uses no sliding_window"),
        (
            GEMMA | {"layer_types": ["chunked_attention"] * 2},
            'layer_types is invalid: got "chunked_attention" of layer 0, expected ',
        ),
        (
            LLAMA | {"model_type": "qwen2_moe", "layer_types": ["sliding_attention"] * 2},
            "the configuration gives or uses no sliding_window",
        ),
        (LLAMA | {"model_type": "llama4_text"}, "'llama4_text' is not supported: it scales "),
        (LLAMA | {"model_type": "gptj", "rope_theta": 50.0}, "rope_theta = 50.0"),
        (
            LLAMA | {"model_type": "gemma3_text", "attn_logit_softcapping": 2.0},
            "got attn_logit_softcapping = 2.0",
        ),
        (GEMMA | {"sliding_window": 1e30}, "sliding_window is invalid: got 1e+30, "),
        (GEMMA | {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar is invalid: got -4, "),
        (LLAMA | {"model_type": "granite", "attention_multiplier": 0}, "_multiplier is invalid: "),
    ],
)  # fmt: skip
def test_wrong_configuration_is_a_problem(tmp_path: Path, config: Any, expected: str) -> None:
    folder = small_checkpoints.write(tmp_path / "bad", bert_tensors(), config)
    if isinstance(config, dict) and config.get("model_type") not in (None, "bert", "gpt_neo"):
        (folder / "model.safetensors").unlink()
        save_file(llama_tensors(), folder / "model.safetensors")
    assert expected in problem_of(folder)


ODD: Final = [
    0, -1, 2, 0.5, 1e300, 10**400, 1e-300, float("inf"), "x", "", True, False, None, [], [None],
    [[]], [["local"], 1], [[["local"], 0]], [[["local"], "x"]], [[["local"], 2**70]], {},
    {"rope_type": "yarn"}, {"rope_type": []}, {"rope_type": "linear", "factor": None},
    {"rope_type": "llama3", "factor": "x"}, {"sliding_attention": 3}, {"full_attention": "x"},
]  # fmt: skip


@pytest.mark.parametrize("model_type", known_models.KNOWN)
def test_odd_value_of_any_field_is_read_or_named(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """No fault of Python ends the reading, whose message would have neither file nor field.

    A field that the reading of a plain configuration does not look up leaves each step of it as
    it is, up to the last, which names what was not read: one such field stands for all.
    """
    plain: dict[str, Any] = {
        "num_attention_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 4,
    }
    plain["model_type"] = model_type
    read = set[str]()
    monkeypatch.setattr(model_config, "ReadFields", lambda fields: ReadFields(fields, read))
    for path in ("model.layers.3.self_attn", "attention"):
        read.clear()
        read_or_named(ReadFields(plain, read), path)
        fields = [*sorted(read), "no_field_of_a_model"]
        assert len(fields) > 10
        for field, value in itertools.product(fields, ODD):
            read_or_named(plain | {field: value}, path)


def read_or_named(config: dict[str, Any], path: str) -> None:
    with contextlib.suppress(InvalidContent):
        model_config.read_config(config, path, None)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_damaged_configuration_is_a_problem(tmp_path: Path, text: str) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "config.json").write_text(text)
    assert "config.json: " in problem_of(folder)


def test_number_that_is_not_finite_is_a_problem(tmp_path: Path) -> None:
    folder = small_checkpoints.llama(tmp_path / "bad", GEMMA)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('softcapping": 2.0', 'softcapping": 1e999'))
    assert "config.json: attn_logit_softcapping is invalid: got Infinity" in problem_of(folder)
