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
    positions = 'positions = "none", rope = {base = 10000.0} or alibi = true'
    causal = "causal = true or causal = false"
    reason = "there is no config.json"
    expected = {
        "": (reason, f"heads = 2; {causal}; {positions}"),
        "heads = 4\n": ("there is no config.json", f"{causal}; {positions}"),
        'heads = 4\npositions = "rotary"\n': (
            "the rotary embedding is not known", f"{causal}; rope = {{base = 10000.0}}"
        ),
    }  # fmt: skip
    for text, (reason, lines) in expected.items():
        own.write_text(text)
        problem = problem_of(path)
        assert problem.startswith(f"model.layers: {reason}" if "rotary" not in text else "model.")
        assert reason in problem
        assert problem.endswith(f'; write below [layers."model.layers"] into mine.toml: {lines}')
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


def test_tower_that_is_not_known_leaves_the_other_layers_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_checkpoints.write(tmp_path / "two", two_towers(), TOWERS)
    loaded = load(folder)
    assert list(loaded.names) == [f"small.language_model.layers.{i}" for i in range(2)]
    (checkpoint,) = loaded.checkpoints
    assert checkpoint.problem is None
    ((path, problem),) = checkpoint.unserved.items()
    assert path == "vision_tower.encoder.layers"
    assert problem.startswith(f"{path}: the model type 'siglip_vision_model' is not known; ")
    assert f'write below [layers."{path}"] into qkv.toml: causal = true or ' in problem
    assert any("layers of checkpoint small are not served: vision_" in m for m in caplog.messages)
    lines, table = 'positions = "none"\n', f'[layers."{path}"]\n'
    described = []
    # at the top, positions are those that config.json leaves open
    for toml in (f"{table}{lines}causal = false", f"{lines}{table}causal = false"):
        (folder / "qkv.toml").write_text(toml)
        loaded = load(folder)
        assert not loaded.checkpoints[0].unserved
        described.append([loaded.describe(name) for name in loaded.names])
    assert described[0] == described[1]
    ropes = {layer["name"]: layer["rope"] for layer in described[0]}
    assert ropes["small.language_model.layers.1"] is not None
    assert ropes["small.vision_tower.encoder.layers.1"] is None


@pytest.mark.parametrize(
    "path",
    ["connector.perceiver_resampler", "model.vision_tower.resampler", "qformer", "audio_tower"],
)
def test_module_between_the_towers_has_the_configuration_of_none(tmp_path: Path, path: str) -> None:
    """Its widths are those of the text, which proves nothing."""
    tensors = {n.replace("model.", "language_model."): t for n, t in llama_tensors().items()}
    tensors |= {n.replace("model.", f"{path}."): t.clone() for n, t in llama_tensors().items()}
    loaded = load(small_checkpoints.write(tmp_path / "m", tensors, TOWERS))
    assert list(loaded.names) == [f"small.language_model.layers.{i}" for i in range(2)]
    problem = loaded.checkpoints[0].unserved[f"{path}.layers"]
    assert "config.json has no part that is known to be of these layers" in problem
    assert "heads = 2; causal = " in problem


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
    assert "names and shapes fit bloom, falcon; config.json has no model type" in problem
    assert 'into qkv.toml: layout = "bloom"; causal = ' in problem


def test_norm_of_the_file_beside_the_tensors(tmp_path: Path) -> None:
    toml = 'input_norm = {module = "input_layernorm", kind = "layer", eps = 0.5}\n'
    folder = small_checkpoints.write(tmp_path / "a", llama_tensors(), LLAMA, toml)
    loaded = load(folder)["small.model.layers.0"].loaded
    assert loaded is not None
    assert loaded.norm is not None
    assert loaded.norm.is_centered
    assert loaded.norm.numbers.eps == 0.5


def test_model_of_an_unknown_type_is_asked_for_all_at_once(tmp_path: Path) -> None:
    """One message for all layers: answered literally, they are served."""
    config = LLAMA | {
        "model_type": "mine", "sliding_window": 4, "attn_logit_softcapping": 30.0,
        "layer_types": ["full_attention"] * 2, "attention_multiplier": None,
        "attn_temperature": 2.0,
    }  # fmt: skip
    tensors = llama_tensors() | {
        f"model.layers.{i}.self_attn.{n}_norm.weight": torch.ones(4) for i in (0, 1) for n in "qk"
    }
    problem = problem_of(small_checkpoints.write(tmp_path / "m", tensors, config))
    assert problem == (
        "model.layers: the model type 'mine' is not known; config.json has rope_theta; config.json "
        "has sliding_window; config.json has attn_logit_softcapping; config.json has "
        "attn_temperature; the numbers of the norms of queries and keys are not known; write "
        'below [layers."model.layers"] into qkv.toml: causal = true or causal = false; positions '
        '= "none", rope = {base = 10000.0} or alibi = true; window = [4095, 0] or window = false; '
        "softcap = 50.0 or softcap = false; scale = 0.125 or scale = false; qk_norm = {eps = 1e-6} "
        "or qk_norm = {eps = 1e-6, offset = 1}"
    )
    lines = 'causal = true\npositions = "none"\nwindow = [3, 0]\nsoftcap = false\nscale = false\n'
    toml = f'[layers."model.layers"]\n{lines}qk_norm = {{eps = 1e-6}}\n'
    loaded = load(small_checkpoints.write(tmp_path / "m", tensors, config, toml))
    described = loaded.describe("small.model.layers.0")
    assert described["parameters"] == {"causal": True, "window": [3, 0]}
    assert (described["rope"], described["heads"]) == (None, 4)


def test_number_of_heads_that_is_suggested_fits_the_width(tmp_path: Path) -> None:
    tensors = {n: torch.randn([8] * t.dim()) for n, t in bert_tensors().items()}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors))
    assert "into qkv.toml: heads = 1; causal = true or causal = false" in problem


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
