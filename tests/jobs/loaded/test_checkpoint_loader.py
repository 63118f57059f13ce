"""Loading of checkpoints: what is read, and what a wrong file does."""

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
from qkv.wire.checkpoint.tensor_file import TensorFile
from support import small_checkpoints
from support.checkpoints import write_raw
from support.small_checkpoints import (
    BERT,
    BYTES,
    HEADS,
    LLAMA,
    WIDTH,
    bert_tensors,
    llama_tensors,
    load,
    problem_of,
)


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


def entry(first: int, last: int, shape: Any = (4,), code: str = "F32") -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [first, last]}


def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert "No such file" in problem_of(tmp_path / "none.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "it is no regular file" in problem_of(tmp_path / "pipe.safetensors")
    (tmp_path / "empty").mkdir()
    assert "a directory without a .safetensors file" in problem_of(tmp_path / "empty")
    assert "File name too long" in problem_of(tmp_path / ("a" * 300))


def test_pipe_beside_the_tensors_is_a_problem(tmp_path: Path) -> None:
    """To open it would wait for a writer for ever."""
    for name in ("model.safetensors.index.json", "config.json", "qkv.toml"):
        folder = small_checkpoints.bert(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        if name.startswith("model"):
            (folder / "model.safetensors").unlink()
        os.mkfifo(folder / name)
        assert problem_of(folder) == f"{name} is no regular file"


def test_index_that_is_too_long_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 1 << 30)
    assert "is too long: expected at most 33554432 bytes" in problem_of(path)


def test_name_that_is_too_long_is_a_problem(tmp_path: Path) -> None:
    header = {"q_proj." * 147: entry(0, 16)}
    path = write_raw(tmp_path / "bad.safetensors", header, b"\0" * 16)
    assert "is too long: got 1029 characters, expected at most 1024" in problem_of(path)


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


@pytest.mark.parametrize(
    "folder",
    ["a  b", "a\tb", "it's", 'a "b" $c', "\x1b[1m", "a\nb", "\u00fc\u200b", "a\\b", "x" * 200],
)
def test_problem_has_no_folder_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Messages have it as it is, in the words of Python and of a shell; a path may be relative."""
    secret = tmp_path / f"{folder} SECRET" / folder
    files = {
        "model.safetensors": "", "model.bin": "", "model.safetensors.index.json": "{}",
        "config.json": "{", "qkv.toml": "a", "none": "",
    }  # fmt: skip
    problems = []
    for number, (name, text) in enumerate(files.items()):
        model = secret / str(number)
        if name in ("config.json", "qkv.toml"):
            small_checkpoints.bert(model)
        model.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(text)
        monkeypatch.chdir(model)
        problems += [problem_of(path) for path in (model, model / name, Path(), Path(name))]
    for part in ("part.bin", "part.safetensors"):
        path = secret / "index" / "model.safetensors.index.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"weight_map": {"a": part}}))
        problems += [problem_of(path.parent), problem_of(path)]
    for problem in problems:
        assert problem
        assert "SECRET" not in problem
        assert "/" not in problem


def test_budget_is_checked_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_checkpoints.bert(tmp_path / "a")
    size = load(folder).checkpoints[0].bytes
    aligned = len(load(folder).names) * 4 * (WIDTH * WIDTH * 4 + 64)
    assert size == aligned  # 16 numbers of a bias take 64 bytes
    load(folder, size)
    monkeypatch.setattr(TensorFile, "read_into", None)
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
    path, read = folder / "model.safetensors", TensorFile.read_into

    def read_and_write(file: TensorFile, *place: Any) -> None:
        if file.path == path:
            os.utime(path, ns=(0, 0))
        read(file, *place)

    monkeypatch.setattr(TensorFile, "read_into", read_and_write)
    assert "the file changed while it was read" in problem_of(folder)


def test_file_that_is_shortened_while_it_is_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_checkpoints.bert(tmp_path / "bad")
    path, read = folder / "model.safetensors", TensorFile.read_into

    def shorten_and_read(file: TensorFile, *place: Any) -> None:
        if file.path == path:
            os.truncate(path, path.stat().st_size // 2)
        read(file, *place)

    monkeypatch.setattr(TensorFile, "read_into", shorten_and_read)
    assert "it ends before its last tensor" in problem_of(folder)


def test_layer_of_zeros_or_of_two_dtypes_is_a_problem(tmp_path: Path) -> None:
    name = "encoder.layer.1.attention.self.key.weight"
    zeros = bert_tensors() | {name: torch.zeros(WIDTH, WIDTH)}
    assert "all zeros" in problem_of(small_checkpoints.write(tmp_path / "z", zeros, BERT))
    mixed = bert_tensors() | {name: torch.ones(WIDTH, WIDTH, dtype=torch.float16)}
    assert "dtype" in problem_of(small_checkpoints.write(tmp_path / "m", mixed, BERT))


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_layernorm.norms.0.weight",
        "self_attn.q_layernorm.weight",
        "self_attn.relative_attention_bias.weight",
        "self_attn.logit_scale",
        "self_attn.q_bias",
        "self_attn.q_norm.norms.0.weight",
        "self_attn.q_proj.lora_A.weight",
        *(f"self_attn.{n}.weight" for n in ("gate_proj", "g_proj", "Wo", "projection_layer")),
        *(f"self_attn.{n}.weight" for n in ("attn_sub_norm", "inner_attn_ln", "norm", "conv1d")),
        *(f"self_attn.{n}.weight" for n in ("relative_k_proj", "dt_proj", "query_global")),
        *(f"self_attn.{n}" for n in ("bias_u", "lambda_q1", "A_log", "softmax_offset", "bias")),
    ],
)
def test_tensor_of_the_module_that_no_layout_reads_is_a_problem(tmp_path: Path, name: str) -> None:
    """Below a known type too: its file has more than the module that the type has."""
    tensors = llama_tensors() | {f"model.layers.1.{name}": torch.ones(2)}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, LLAMA))
    assert problem.startswith(f"model.layers.1.self_attn: model.layers.1.{name} is not supported")


@pytest.mark.parametrize(
    "name",
    [
        "model.relative_attention_bias.weight",
        "model.rel_embeddings.weight",
        "model.layers.1.attn_gate",
        "model.layers.1.position_bias_table",
    ],
)
def test_what_the_attention_reads_beside_its_module_is_a_problem(tmp_path: Path, name: str) -> None:
    tensors = llama_tensors() | {name: torch.ones(2)}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, LLAMA))
    assert problem.startswith(f"model.layers: {name} is not supported: no layout reads it")


def test_table_beside_one_tower_refuses_that_tower_alone(tmp_path: Path) -> None:
    tensors = {f"a.{n}": t for n, t in bert_tensors().items()}
    tensors |= {f"b.{n}": t.clone() for n, t in bert_tensors().items()}
    tensors["a.encoder.relative_attention_bias.weight"] = torch.ones(9, HEADS)
    loaded = load(small_checkpoints.write(tmp_path / "two", tensors, BERT))
    assert list(loaded.names) == [f"small.b.encoder.layer.{i}" for i in range(2)]
    assert list(loaded.checkpoints[0].unserved) == ["a.encoder.layer"]


def test_gate_beside_the_query_is_named(tmp_path: Path) -> None:
    """Not kv_heads, whose number is right."""
    tensors = llama_tensors()
    for name in [n for n in tensors if "q_proj" in n]:
        tensors[name] = torch.randn(2 * WIDTH, WIDTH)
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, LLAMA))
    assert "a gate of the output is not supported: got 32 outputs of the query" in problem
    assert "kv_heads" not in problem


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (("layers.0.self_attn.kv_a_proj.weight", "layers.0.self_attn.q_b_proj.weight"),
         "'layers.0.self_attn.q_b_proj.weight' (latent attention), expected"),
        (("blocks.0.norm.weight", "blocks.0.attn.Wqkv.weight"),
         "got 'blocks.0.attn.Wqkv.weight' (fused in an order that"),
        (("lm_head.weight",), "got 'lm_head.weight', expected"),
        (("emb.weight", "b.0.SelfAttention.q.weight",
          "b.0.SelfAttention.relative_attention_bias.weight"), "(relative positions), expected"),
    ],
)  # fmt: skip
def test_attention_of_no_layout_is_described(
    tmp_path: Path, tensors: tuple[str, ...], expected: str
) -> None:
    folder = small_checkpoints.write(tmp_path / "n", {n: torch.ones(2, 2) for n in tensors}, BERT)
    problem = problem_of(folder)
    assert "has 0 attention layers: got '" in problem
    assert expected in problem


def test_buffers_and_other_modules_are_no_problem(tmp_path: Path) -> None:
    """Of any dtype; those of a layer inside a module belong to that layer."""
    tensors = llama_tensors() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "model.layers.0.mlp.q_norm.weight": torch.ones(2),
        "logit_scale": torch.ones(()),
    }
    inner = {
        f"model.layers.0.self_attn.inner.{n.rpartition('attn.')[2]}": t.clone()
        for n, t in llama_tensors().items()
        if "layers.0.self_attn" in n
    }
    tensors |= inner | {"model.layers.0.self_attn.inner.q_norm.weight": torch.ones(4)}
    loaded = load(small_checkpoints.write(tmp_path / "a", tensors, LLAMA))
    assert {name: loaded.describe(name)["qk_norm"] is not None for name in loaded.names} == {
        "small.model.layers.0.self_attn": False,
        "small.model.layers.0.self_attn.inner": True,
        "small.model.layers.1": False,
    }


@pytest.mark.parametrize("name", ["o_proj.weight", "q_proj.bias", "q_norm.weight", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_weight_of_another_dtype_is_a_problem(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    shape = (WIDTH, WIDTH) if name == "o_proj.weight" else (HEADS,)
    name = f"model.layers.0.self_attn.{name}"
    tensors = llama_tensors() | {name: torch.ones(shape).to(dtype)}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, LLAMA))
    code = "U8" if dtype == torch.uint8 else "F8_E4M3"
    assert f"{name} has an unknown dtype: got {code}, expected float64, float32, " in problem


def test_norm_of_another_dtype_is_a_problem(tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    tensors = llama_tensors() | {name: torch.ones(WIDTH).to(torch.float8_e4m3fn)}
    problem = problem_of(small_checkpoints.write(tmp_path / "bad", tensors, LLAMA))
    assert f"{name} has an unknown dtype: got F8_E4M3" in problem


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
