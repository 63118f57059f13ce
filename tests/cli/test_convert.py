"""Tests of `qkv convert` on the checkpoints of real models, with a service and without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from qkv import Client
from support.checkpoints import gpt2, llama, v1_of_llama, write_raw
from support.commands import (
    SUFFIXES,
    TARGETS,
    error_of,
    normal,
    one_error,
    stdout_of,
    target_options,
    write_tensors,
)

PREFIX = "model.layers.10.self_attn"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama in float32, one in bfloat16 in several files, and a GPT-2."""
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "llama")
    llama(torch.bfloat16).save_pretrained(folder / "sharded", max_shard_size="20KB")
    gpt2().save_pretrained(folder / "gpt2")
    return folder


def load(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) and ours[n].dtype == t.dtype for n, t in theirs.items())


@pytest.mark.parametrize("place", TARGETS)
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("sharded", torch.bfloat16)])
def test_prefix_selects_a_layer(
    url: str, models: Path, tmp_path: Path, name: str, dtype: torch.dtype, place: str
) -> None:
    target = tmp_path / "out.safetensors"
    printed = stdout_of(
        "convert", models / name, "--prefix", PREFIX, "--to", "v1", "--heads", "4", "-o", target,
        *target_options(place, url),
    )  # fmt: skip
    assert_equal(load(target), v1_of_llama(llama(dtype).state_dict(), PREFIX))
    assert f"from llama at {PREFIX} to v1, rotary order half" in printed


def test_mask_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    state = gpt2().state_dict()
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4).byte() for i in range(2)}
    source, target = tmp_path / "gpt2.safetensors", tmp_path / "out.safetensors"
    safetensors.torch.save_file({n: t.clone() for n, t in (state | masks).items()}, source)
    words = ("convert", source, "--prefix", "transformer.h.1.attn", "--to", "mha", "-o", target)
    assert "not part of the attention" not in stdout_of(*words, "--local")
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    module.load_state_dict(load(target))


def test_small_file_is_sent_whole_and_its_only_layer_needs_no_prefix(
    url: str, tmp_path: Path
) -> None:
    model = llama(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    target = tmp_path / "out" / "v1.safetensors"
    target.parent.mkdir()
    words = ("convert", tmp_path, "--to", "v1", "--heads", "4", "-o", target)
    stdout_of(*words, "--url", url)
    assert_equal(load(target), v1_of_llama(model.state_dict(), "model.layers.0.self_attn"))


@pytest.mark.parametrize("place", TARGETS)
def test_several_layers_without_a_prefix_are_listed(
    url: str, models: Path, tmp_path: Path, place: str
) -> None:
    words = ("convert", "--to", "v1", "-o", tmp_path / "o.npz", *target_options(place, url))
    line = error_of(tmp_path, *words, models / "gpt2")
    assert "prefix is missing: there are 2 layers, at 'transformer.h.0.attn'" in line
    assert line.endswith("(--prefix)")
    for prefix in ("model.layers.99.self_attn", "model.layers.1.self"):
        line = error_of(tmp_path, *words, models / "llama", "--prefix", prefix)
        assert f"prefix fits no tensor: got '{prefix}'" in line
    line = error_of(tmp_path, *words, models / "llama", "--prefix", "model.norm")
    assert "layout is not recognized: got 'model.norm.weight'" in line


def huge(path: Path, layers: int = 1) -> dict[str, torch.Tensor]:
    """Writes a Llama whose embedding is a hole of 1 TiB; returns its other tensors."""
    state: dict[str, torch.Tensor] = llama(num_hidden_layers=layers).state_dict()
    state.pop("model.embed_tokens.weight")
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in state.items():
        span = [end, end := end + 4 * tensor.numel()]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
    span = [end, end + (1 << 40)]
    header["model.embed_tokens.weight"] = {
        "dtype": "BF16", "shape": [1 << 35, 16], "data_offsets": span,
    }  # fmt: skip
    data = b"".join(t.numpy().tobytes() for t in state.values())
    write_raw(path, header, data, span[1])
    return state


@pytest.mark.parametrize("flags", [(), ("--prefix", "model.layers.0.self_attn")])
@pytest.mark.parametrize("place", TARGETS)
def test_only_the_layer_is_read(
    url: str, tmp_path: Path, flags: tuple[str, ...], place: str
) -> None:
    state = huge(tmp_path / "model.safetensors")
    target = tmp_path / "v1.safetensors"
    words = ("convert", tmp_path / "model.safetensors", "--to", "v1", "--heads", "4", "-o", target)
    stdout_of(*words, *flags, *target_options(place, url))
    assert_equal(load(target), v1_of_llama(state, "model.layers.0.self_attn"))


def test_too_short_prefix_reads_nothing(models: Path, tmp_path: Path) -> None:
    llama(num_hidden_layers=40).save_pretrained(tmp_path)
    words = ("convert", tmp_path, "--to", "v1", "-o", tmp_path / "o.npz", "--local")
    line = error_of(tmp_path, *words, "--prefix", "model")
    assert "prefix is too short: got 362 tensors" in line
    assert "at most 256" in line


@pytest.mark.slow
def test_large_file_without_torch_needs_a_prefix(url: str, tmp_path: Path) -> None:
    huge(tmp_path / "model.safetensors")
    words = ["convert", str(tmp_path / "model.safetensors"), "--to", "v1", "--heads", "4", "-o",
             str(tmp_path / "out.npz"), "--url", url]  # fmt: skip
    program = "import sys; sys.modules['torch'] = None; from qkv.cli.main import main; main({})"

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program.format(words)],
            capture_output=True,
            text=True,
            check=False,
        )

    done = run(words)
    assert "prefix is missing: torch is needed" in one_error(done.stderr)
    done = run([*words, "--prefix", "model.layers.0.self_attn"])
    assert (done.returncode, done.stderr) == (0, "")


def test_rotary_order_is_written_and_read_back(models: Path, tmp_path: Path) -> None:
    """v1 has no rotary order of its own: the file remembers the one that it was written in."""
    v1, back = tmp_path / "v1.safetensors", tmp_path / "back.safetensors"
    words = ("--prefix", PREFIX, "--to", "v1", "--heads", "4", "--to-order", "interleaved")
    printed = stdout_of("convert", models / "llama", *words, "-o", v1, "--local")
    assert "rotary order interleaved" in printed
    stdout_of("convert", v1, "--to", "llama", "--heads", "4", "-o", back, "--local")
    state = llama().state_dict()
    names = [f"{r}_proj.weight" for r in "qkvo"]
    assert_equal(load(back), {n: state[f"{PREFIX}.{n}"] for n in names})
    wrong = tmp_path / "wrong.safetensors"
    flags = ("--rope", '{"order": "half"}')  # overrides the file
    stdout_of("convert", v1, "--to", "llama", "--heads", "4", *flags, "-o", wrong, "--local")
    assert not torch.equal(load(wrong)["q_proj.weight"], load(back)["q_proj.weight"])
    assert torch.equal(load(wrong)["v_proj.weight"], load(back)["v_proj.weight"])


def test_flags_are_fields_of_the_request(url: str, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    state = llama().state_dict()
    with Client(url) as client:
        converted = client.convert(
            state, target="mha", prefix=PREFIX, heads=4, kv_heads=2, grouped="repeat"
        )
    words = ("convert", models / "llama", "--prefix", PREFIX, "--to", "mha", "--heads", "4")
    options = ("-o", target, "--local")
    stdout_of(*words, "--kv-heads", "2", "--grouped", "repeat", *options)
    assert_equal(load(target), dict(converted.tensors))
    line = error_of(tmp_path, *words, *options)
    assert 'Set "grouped" to "repeat"' in line
    line = error_of(tmp_path, *words, "--kv-heads", "4", *options)
    assert line.endswith("(--kv-heads)")
    line = error_of(tmp_path, *words, "--rope", '{"order": "meta"}', *options)
    assert line.endswith("(--rope)")
    assert "a JSON object" in error_of(tmp_path, *words, "--rope", "half", *options)


def test_quantized_weight_is_named(tmp_path: Path) -> None:
    header = {
        f"attn.{r}_proj.weight": {
            "dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [16 * i, 16 * i + 16]
        }
        for i, r in enumerate("qkv")
    }  # fmt: skip
    path = write_raw(tmp_path / "a.safetensors", header, b"\x38" * 48)
    words = ("convert", path, "--to", "v1", "-o", tmp_path / "o.npz", "--local")
    assert "_proj.weight has the wrong dtype: got F8_E4M3" in error_of(tmp_path, *words)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_may_begin_with_layer(tmp_path: Path, suffix: str) -> None:
    """An encoder of BERT has such names."""
    roles = ("query", "key", "value")
    arrays = {f"layer.0.W_{r}.weight": normal(4, 6, seed=i) for i, r in enumerate(roles)}
    path = write_tensors(tmp_path / f"in{suffix}", "tensors", arrays)
    target = tmp_path / "out.safetensors"
    stdout_of("convert", path, "--prefix", "layer.0", "--to", "v1", "-o", target, "--local")
    assert load(target)["W_key"].numpy().T.tobytes() == arrays["layer.0.W_key.weight"].tobytes()


@pytest.mark.parametrize("place", TARGETS)
def test_weights_that_are_not_numbers_are_converted(url: str, tmp_path: Path, place: str) -> None:
    arrays = {f"W_{r}.weight": normal(4, 6, seed=i) for i, r in enumerate(("query", "key"))}
    arrays["W_value.weight"] = np.full((4, 6), np.nan, np.float32)
    path = write_tensors(tmp_path / "in.safetensors", "tensors", arrays)
    options = ("--to", "v1", "-o", tmp_path / "out.safetensors", *target_options(place, url))
    assert "both layers differ by nan at most" in stdout_of("convert", path, *options)
