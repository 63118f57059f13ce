"""Loading of checkpoints: what is read, what is asked for, and what a wrong file does."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qkv.errors import InvalidContent
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.wire.checkpoint.tensor_file import TensorFile
from support import small_checkpoints
from support.checkpoints import write_raw
from support.small_checkpoints import BERT, GEMMA, HEADS, LLAMA, WIDTH, bert_tensors, llama_tensors

BYTES = 1 << 30


def load(path: Path, max_bytes: int = BYTES) -> LoadedLayers:
    """Loads one checkpoint, which must have no problem."""
    return load_checkpoints({"small": path}, max_bytes, is_strict=True)


def problem_of(path: Path, max_bytes: int = BYTES) -> str:
    """Returns the problem of a checkpoint beside another one, which is loaded all the same."""
    good = small_checkpoints.bert(path.parent / "good")
    loaded = load_checkpoints({"bad": path, "good": good}, max_bytes)
    bad, other = loaded.checkpoints
    assert not bad.layers
    assert len(other.layers) == 2
    assert bad.problem is not None
    assert "\n" not in bad.problem
    with pytest.raises(InvalidContent, match="checkpoint bad: "):
        load_checkpoints({"bad": path, "good": good}, max_bytes, is_strict=True)
    return bad.problem


def test_layers_are_named_by_the_path_of_their_block(tmp_path: Path) -> None:
    loaded = load(small_checkpoints.bert(tmp_path / "bert"))
    assert list(loaded.names) == ["small.encoder.layer.0", "small.encoder.layer.1"]
    described = loaded.describe("small.encoder.layer.1")
    assert described["layout"] == "bert"
    assert described["heads"] == described["kv_heads"] == HEADS
    assert described["width"] == described["output_width"] == WIDTH
    assert described["parameters"] == {}
    assert described["inputs"] == ["attention"]


def test_two_layers_of_a_block_have_their_whole_paths(tmp_path: Path) -> None:
    tensors = {
        f"decoder.layers.0.{kind}_attn.{module}_proj.weight": torch.randn(WIDTH, WIDTH)
        for kind in ("self", "encoder")
        for module in ("q", "k", "v", "out")
    }
    config = {"model_type": "whisper", "d_model": WIDTH, "decoder_attention_heads": HEADS}
    loaded = load(small_checkpoints.write(tmp_path / "w", tensors, config))
    names = ["small.decoder.layers.0.self_attn", "small.decoder.layers.0.encoder_attn"]
    assert sorted(loaded.names) == sorted(names)
    own, cross = (loaded.describe(name)["parameters"] for name in names)
    assert (own, cross) == ({"causal": True}, {})


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


def test_weights_are_dense_aligned_and_shared_with_forks(tmp_path: Path) -> None:
    tensors = bert_tensors()
    layer = load(small_checkpoints.bert(tmp_path / "bert"))["small.encoder.layer.1"]
    for array in layer.weights.values():
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
    expected = tensors["encoder.layer.1.attention.self.key.weight"].T.numpy()
    assert np.array_equal(layer.weights["key.weight"], expected)
    assert layer.tensors == {}
    reader, writer = os.pipe()
    if not (pid := os.fork()):  # a shared page, not a copy: the parent sees what the child writes
        layer.weights["query.bias"][:] = 7
        os.write(writer, b"x")
        os._exit(0)
    os.waitpid(pid, 0)
    assert (layer.weights["query.bias"] == 7).all()
    os.close(reader)
    os.close(writer)


def test_index_of_several_files_is_one_checkpoint(tmp_path: Path) -> None:
    tensors, shards = bert_tensors(), dict[str, str]()
    for shard in range(2):
        part = {n: t for n, t in tensors.items() if f"layer.{shard}." in n}
        save_file(part, tmp_path / f"part-{shard}.safetensors")
        shards |= dict.fromkeys(part, f"part-{shard}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    for path in (index, tmp_path):
        assert len(load(path).names) == 2


def test_file_beside_the_tensors_gives_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(llama_tensors(), path)
    own = tmp_path / "mine.toml"
    expected = {
        "": ("model.layers.0.self_attn: the number of heads is not known", "write heads = 12"),
        "heads = 4\n": ("the positions are not known", 'positions = "none"'),
    }
    for text, (reason, asked) in expected.items():
        own.write_text(text)
        problem = problem_of(path)
        assert reason in problem
        assert f"{asked}" in problem
        assert problem.endswith("into mine.toml")
    own.write_text(
        'heads = 4\ncausal = true\n[rope]\nbase = 50.0\n[layers."model.layers.1"]\nwindow = [1, 0]'
    )
    first, second = (load(path).describe(f"small.model.layers.{i}") for i in range(2))
    assert first["rope"]["base"] == 50.0
    assert first["parameters"] == {"causal": True}
    assert second["parameters"] == {"causal": True, "window": [1, 0]}


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
    ("config", "expected"),
    [
        (BERT | {"num_attention_heads": 5}, "heads"),
        (BERT | {"num_attention_heads": 0}, "heads"),
        (BERT | {"hidden_size": 99}, "belongs to another model"),
        (BERT | {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        (BERT | {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        (BERT | {"model_type": "llama", "rope_theta": -1.0}, "rope"),
        ({"model_type": "bert"}, "the number of heads is not known"),
        ([1, 2], "expected an object"),
        ({"model_type": ["x"], "num_attention_heads": HEADS}, "positions"),
        (BERT | {"model_type": "gpt_neo", "attention_types": [[None, 3]]}, "cannot be read"),
    ],
)
def test_wrong_configuration_is_a_problem(tmp_path: Path, config: Any, expected: str) -> None:
    folder = small_checkpoints.write(tmp_path / "bad", bert_tensors(), config)
    if config != {} and isinstance(config, dict) and config.get("model_type") == ["x"]:
        (folder / "model.safetensors").unlink()
        save_file(llama_tensors(), folder / "model.safetensors")
    assert expected in problem_of(folder)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_damaged_configuration_is_a_problem(tmp_path: Path, text: str) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "config.json").write_text(text)
    assert "config.json: " in problem_of(folder)


@pytest.mark.parametrize(
    "text", ["heads = ", "heads = -1", "other = 1", "layers = 1\nheads = 4", "scale = -1.0"]
)
def test_damaged_file_beside_the_tensors_is_a_problem(tmp_path: Path, text: str) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "qkv.toml").write_text(text)
    assert "qkv.toml: " in problem_of(folder)


def entry(first: int, last: int, shape: Any = (4,), code: str = "F32") -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": 1},
        {"a": entry(0, 16, [4.0])},
        {"a": entry(0, 16, [-4])},
        {"a": entry(0, 17)},
        {"a": entry(16, 0)},
        {"a": entry(0, 1 << 40)},
        {"a": entry(0, 16, [1 << 62, 0, 4])},
        {"a": entry(0, 16, [1] * 9)},
        {"a": entry(0, 16) | {"dtype": None}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}},
        [],
    ],
)
def test_hostile_header_is_a_problem(tmp_path: Path, header: Any) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, b"\0" * 16)
    assert "not a safetensors file" in problem_of(path)


def test_header_that_is_longer_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for length in (1 << 62, (1 << 64) - 1, 1 << 20):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        assert "its header has a wrong length" in problem_of(path)


def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert "No such file" in problem_of(tmp_path / "none.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "it is no regular file" in problem_of(tmp_path / "pipe.safetensors")
    (tmp_path / "empty").mkdir()
    assert "a directory without a .safetensors file" in problem_of(tmp_path / "empty")


def test_problem_has_no_path_of_the_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    (folder / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.ERROR):
        problem = problem_of(folder)
    assert str(tmp_path) not in problem
    assert problem.startswith("model.safetensors: not a safetensors file: ")
    line = caplog.messages[0]
    assert line.startswith(f"checkpoint bad is not served: {folder}/model.safetensors: not a ")


def test_budget_is_checked_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_checkpoints.bert(tmp_path / "a")
    size = load(folder).checkpoints[0].bytes
    aligned = len(load(folder).names) * 4 * (WIDTH * WIDTH * 4 + 64)
    assert size == aligned  # 16 numbers of a bias take 64 bytes
    load(folder, size)
    monkeypatch.setattr(TensorFile, "read", None)
    with pytest.raises(InvalidContent, match=f"too large: got {size} bytes, expected at most"):
        load(folder, size - 1)


def test_second_checkpoint_has_what_the_first_one_left(tmp_path: Path) -> None:
    folder = small_checkpoints.bert(tmp_path / "a")
    size = load(folder).checkpoints[0].bytes
    first, second = load_checkpoints({"a": folder, "b": folder}, 2 * size - 1).checkpoints
    assert first.problem is None
    assert second.problem is not None
    assert f"expected at most {size - 1} of QKV_MAX_CHECKPOINT_BYTES" in second.problem


def test_file_that_changes_while_it_is_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    path, read = folder / "model.safetensors", TensorFile.read

    def read_and_write(file: TensorFile, name: str) -> Any:
        if file.path == path:
            os.utime(path, ns=(0, 0))
        return read(file, name)

    monkeypatch.setattr(TensorFile, "read", read_and_write)
    assert "the file changed while it was read" in problem_of(folder)


def test_file_that_is_shortened_while_it_is_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    path, read = folder / "model.safetensors", TensorFile.read

    def shorten_and_read(file: TensorFile, name: str) -> Any:
        if file.path == path:
            os.truncate(path, path.stat().st_size // 2)
        return read(file, name)

    monkeypatch.setattr(TensorFile, "read", shorten_and_read)
    assert "it ends before its last tensor" in problem_of(folder)


def test_layer_of_zeros_or_of_two_dtypes_is_a_problem(tmp_path: Path) -> None:
    name = "encoder.layer.1.attention.self.key.weight"
    zeros = bert_tensors() | {name: torch.zeros(WIDTH, WIDTH)}
    assert "all zeros" in problem_of(small_checkpoints.write(tmp_path / "z", zeros, BERT))
    mixed = bert_tensors() | {name: torch.ones(WIDTH, WIDTH, dtype=torch.float16)}
    assert "dtype" in problem_of(small_checkpoints.write(tmp_path / "m", mixed, BERT))
    small = bert_tensors() | {name: torch.ones(WIDTH, WIDTH, dtype=torch.int8)}
    assert "missing" in problem_of(small_checkpoints.write(tmp_path / "i", small, BERT))


@pytest.mark.parametrize("name", ['a"} 1\nb', "a/b", "ü", "a" * 300, "\x1b[31m"])
def test_names_in_a_file_reach_no_log_line_and_no_label(tmp_path: Path, name: str) -> None:
    tensors = {n.replace("encoder", name): t for n, t in bert_tensors().items()}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, BERT))
    assert problem.startswith("a layer has a wrong name: got ")
    assert problem.isprintable()
    assert len(problem) < 500


def test_name_of_a_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="linear has the name of a variant"):
        load_checkpoints({"linear": tmp_path}, BYTES)


def test_checkpoint_without_attention_is_a_problem(tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / "n", {"lm_head.weight": torch.ones(2, 2)}, BERT)
    assert "has 0 attention layers: got 'lm_head.weight'" in problem_of(folder)
