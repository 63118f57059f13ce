"""The operator's file beside a checkpoint: what it asks for, and what it changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support import small_checkpoints
from support.small_checkpoints import (
    BERT,
    LLAMA,
    WIDTH,
    bert_tensors,
    llama_tensors,
    load,
    problem_of,
)


def test_file_beside_the_tensors_gives_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(llama_tensors(), path)
    own = tmp_path / "mine.toml"
    expected = {
        "": ("model.layers.0.self_attn: the number of heads is not known", "write heads = 12"),
        "heads = 4\n": ("the positions are not known", 'positions = "none"'),
        'heads = 4\npositions = "rotary"\n': ("the rotary embedding is not known", "write rope"),
    }
    for text, (reason, asked) in expected.items():
        own.write_text(text)
        problem = problem_of(path)
        assert reason in problem
        assert f"{asked}" in problem
        assert problem.endswith(' below [layers."model.layers"] into mine.toml')
    own.write_text(
        'heads = 4\ncausal = true\n[rope]\nbase = 50.0\n[layers."model.layers.1"]\nwindow = [1, 0]'
    )
    first, second = (load(path).describe(f"small.model.layers.{i}") for i in range(2))
    assert first["rope"]["base"] == 50.0
    assert first["parameters"] == {"causal": True}
    assert second["parameters"] == {"causal": True, "window": [1, 0]}


TOWERS = {
    "model_type": "gemma3",
    "text_config": LLAMA | {"model_type": "gemma3_text"},
    "vision_config": BERT | {"model_type": "siglip_vision_model"},
}


def two_towers() -> dict[str, torch.Tensor]:
    """Returns a model of text, whose positions are known, and one of images."""
    vision = {
        n.replace("model.", "vision_tower.encoder.").replace("o_proj", "out_proj"): tensor
        for n, tensor in llama_tensors().items()
        if "layernorm" not in n
    }
    rows = {n: torch.randn(WIDTH, WIDTH) for n in vision}
    return rows | {n.replace("model.", "language_model."): t for n, t in llama_tensors().items()}


def test_line_that_is_asked_for_leaves_the_other_layers_as_they_are(tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / "two", two_towers(), TOWERS)
    problem = problem_of(folder)
    line = 'positions = "none"'
    assert f"write {line}" in problem
    table = '[layers."vision_tower.encoder.layers"]'
    assert f" below {table} into qkv.toml" in problem
    described = []
    for toml in (f"{table}\n{line}", line):  # at the top, it is what config.json leaves open
        (folder / "qkv.toml").write_text(toml)
        loaded = load(folder)
        described.append([loaded.describe(name) for name in loaded.names])
    assert described[0] == described[1]
    ropes = {layer["name"]: layer["rope"] for layer in described[0]}
    assert ropes["small.language_model.layers.1"] is not None
    assert ropes["small.vision_tower.encoder.layers.1"] is None


def test_table_replaces_positions_of_the_configuration(tmp_path: Path) -> None:
    toml = '[layers.model]\npositions = "alibi"\n[layers."model.layers.1"]\npositions = "none"'
    loaded = load(small_checkpoints.write(tmp_path / "a", llama_tensors(), LLAMA, toml))
    first, second = (loaded.describe(name) for name in loaded.names)
    assert (first["rope"], first["alibi"]) == (None, True)
    assert (second["rope"], second["alibi"]) == (None, False)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ('[layers."model.layer"]\nheads = 4', '[layers."model.layer"] is used by no layer'),
        ('[layers."model.layers.2"]\nheads = 4', '[layers."model.layers.2"] is used by no layer'),
        ('positions = "none"', "positions is used by no layer: expected a table of layers"),
        ('prefix = "model"', "unknown field 'prefix'; known are layout, heads"),
        ('[layers.model]\ninput = "residual"', "unknown field 'input'; known are layout, heads"),
        ("layers = {model = 3}", "layers is wrong: expected tables"),
        ('softcap = "x"', "parameter 'softcap' is invalid: got \"x\""),
        ("softcap = inf", "parameter 'softcap' is invalid: got Infinity"),
        ("window = true", "parameter 'window' is invalid: got true"),
        ('input_norm = {module = "norm9", kind = "rms", eps = 1e-5}',
         "got no tensor model.layers.0.norm9.weight, expected the name of a module"),
    ],
)  # fmt: skip
def test_line_of_the_file_that_has_no_meaning_is_a_problem(
    tmp_path: Path, toml: str, expected: str
) -> None:
    folder = small_checkpoints.write(tmp_path / "bad", llama_tensors(), LLAMA, toml)
    assert expected in problem_of(folder)


def test_example_of_a_layout_is_one_that_fits(tmp_path: Path) -> None:
    tensors = {
        n.replace("self.query", "query_key_value").replace("output.", ""): t
        for n, t in bert_tensors().items()
        if "self.key" not in n and "self.value" not in n
    }
    config = {"num_attention_heads": 2, "hidden_size": WIDTH}
    tensors = {n.replace("attention.", "self_attention."): t for n, t in tensors.items()}
    tensors = {
        n: torch.randn(3 * WIDTH, *t.shape[1:]) if "query" in n else t for n, t in tensors.items()
    }
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, config))
    assert 'names and shapes fit bloom, falcon; write layout = "bloom" below ' in problem


def test_norm_of_the_file_beside_the_tensors(tmp_path: Path) -> None:
    toml = 'input_norm = {module = "input_layernorm", kind = "layer", eps = 0.5}\n'
    folder = small_checkpoints.write(tmp_path / "a", llama_tensors(), LLAMA, toml)
    loaded = load(folder)["small.model.layers.0"].loaded
    assert loaded is not None
    assert loaded.norm is not None
    assert loaded.norm.is_centered
    assert loaded.norm.numbers.eps == 0.5


def test_model_of_an_unknown_type_is_asked_for_what_changes_its_scores(tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "mine", "sliding_window": 4, "attn_logit_softcapping": 30.0}
    given = ""
    asked = {
        "positions": 'positions = "none"\n',
        "window": "window = [3, 0]\n",
        "softcap": "softcap = false\n",
    }
    for field, line in asked.items():
        folder = small_checkpoints.write(tmp_path / "m", llama_tensors(), config, given)
        assert f"write {field} = " in problem_of(folder)
        given += line
    loaded = load(small_checkpoints.write(tmp_path / "m", llama_tensors(), config, given))
    assert loaded.describe("small.model.layers.0")["parameters"] == {"window": [3, 0]}
    assert loaded.describe("small.model.layers.0")["rope"] is None


@pytest.mark.parametrize(
    "text", ["heads = ", "heads = -1", "other = 1", "layers = 1\nheads = 4", "scale = -1.0"]
)
def test_damaged_file_beside_the_tensors_is_a_problem(tmp_path: Path, text: str) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "qkv.toml").write_text(text)
    assert "qkv.toml: " in problem_of(folder)


def test_file_beside_the_tensors_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    """tomllib takes the square of the parts of a key: 3 GB for 56 KB."""
    folder = small_checkpoints.bert(tmp_path / "bad")
    path = folder / "qkv.toml"
    for part, dot in (("a", "."), ("a", "\t. "), ('"\\"a."', "."), ("'a'", ".")):
        for text in ("{} = 1", "heads = 4\n[layers.{}]", "rope = {{{} = 1}}", "a = [{{{} = 1}}]"):
            path.write_text(text.format(dot.join([part] * 17)))
            expected = "qkv.toml: a dotted key is too long: expected at most 16 parts"
            assert problem_of(folder) == expected
    path.write_text("# a\n" * (1 << 16) + "#")
    assert problem_of(folder) == "qkv.toml is too long: expected at most 262144 bytes"
    path.write_text('heads = 4\n[layers."encoder.layer.0.a.b.c.d.e.f.g.h.i.j.k.l.m"]\nheads = 4')
    assert "is used by no layer" in problem_of(folder)


@pytest.mark.parametrize("content", [b"password", b"\xf3", b"a = '\xf3'", b"\x01", b"[z]\n[z]"])
def test_problem_has_no_part_of_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    """A link may lead to any file of the machine."""
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "qkv.toml").write_bytes(content)
    problem = problem_of(folder)
    assert re.fullmatch(r"qkv\.toml: it is not (UTF-8|TOML \(at [a-z0-9, ]+\))", problem)
