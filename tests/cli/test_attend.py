"""Tests of the commands attend, convert and variants, with a real service and without one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from qkv import Client
from qkv.cli.main import main
from support.checkpoints import llama
from support.clients import delays as delays
from support.commands import (
    SUFFIXES,
    TARGETS,
    assert_same_bits,
    error_of,
    normal,
    one_error,
    read_tensors,
    stdout_of,
    target_options,
    tensors,
    write_tensors,
)
from support.commands import source as source
from support.known_requests import Array
from support.ports import free_port
from support.processes import TIMEOUT_S


@pytest.mark.parametrize("place", TARGETS)
@pytest.mark.parametrize("written", SUFFIXES)
@pytest.mark.parametrize("read", SUFFIXES)
def test_every_file_format_has_the_same_bits_as_the_client(
    url: str, tmp_path: Path, read: str, written: str, place: str
) -> None:
    source = write_tensors(tmp_path / f"in{read}", "inputs", tensors())
    target = tmp_path / f"out{written}"
    printed = stdout_of(
        "attend", "softmax", source, "-o", target, "-p", "causal=true", *target_options(place, url)
    )
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), causal=True)
    assert_same_bits(read_tensors(target), run.outputs)
    assert f"written to {target}" in printed
    assert "output           float32   2x4x5x3" in printed
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("read", SUFFIXES)
def test_standard_input_and_output_are_files_too(url: str, tmp_path: Path, read: str) -> None:
    source = write_tensors(tmp_path / f"in{read}", "inputs", tensors())
    words = [sys.executable, "-m", "qkv", "attend", "softmax", "-", "-o", "-", "--url", url]
    done = subprocess.run(
        words, input=source.read_bytes(), capture_output=True, check=True, timeout=TIMEOUT_S
    )
    target = tmp_path / "out.json"
    target.write_bytes(done.stdout)
    with Client(url) as client:
        assert_same_bits(read_tensors(target), client.attend("softmax", **tensors()).outputs)
    assert b"output           float32   2x4x5x3\nweights" in done.stderr
    assert b"written to standard output\n" in done.stderr


@pytest.mark.parametrize("content", [b"", b"[1]", b"PK\x03\x04", b"\x80\x02q"])
def test_standard_input_without_tensors_is_an_error(url: str, content: bytes) -> None:
    done = CliRunner().invoke(main, ["attend", "softmax", "-", "-o", "-", "--url", url], content)
    assert done.exit_code == 1
    assert one_error(done.stderr).startswith("Error: -: ")


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_local_run_has_the_same_bits_as_the_service(url: str, tmp_path: Path, dtype: str) -> None:
    """The inputs are long enough for several blocks and threads."""
    arrays = {n: normal(2, 3, 300, 64, seed=i) for i, n in enumerate(("query", "key", "value"))}
    typed = {n: a.astype(dtype) for n, a in arrays.items()}
    source = write_tensors(tmp_path / "in.npz", "inputs", typed)
    for place in TARGETS:
        target = tmp_path / f"{place}.safetensors"
        stdout_of("attend", "softmax", source, "-o", target, *target_options(place, url))
    assert_same_bits(
        read_tensors(tmp_path / "local.safetensors"), read_tensors(tmp_path / "service.safetensors")
    )


def test_json_output_keeps_the_base64_encoding(tmp_path: Path) -> None:
    source = write_tensors(tmp_path / "in.json", "inputs", tensors(), encoding="base64")
    stdout_of("attend", "softmax", source, "-o", tmp_path / "out.json", "--local")
    outputs = json.loads((tmp_path / "out.json").read_text())["outputs"]
    assert outputs["output"]["dtype"] == "float32"


def test_bfloat16_is_kept_or_stored_exactly(url: str, tmp_path: Path) -> None:
    inputs: dict[str, Any] = {}
    inputs |= {n: torch.from_numpy(a).bfloat16() for n, a in tensors().items() if a.dtype == "f4"}
    safetensors.torch.save_file(inputs, tmp_path / "in.safetensors")
    with Client(url) as client:
        run = client.attend("softmax", **inputs, outputs=["output"])
    for suffix in SUFFIXES:
        target = tmp_path / f"out{suffix}"
        words = ("attend", "softmax", tmp_path / "in.safetensors", "-o", target)
        printed = stdout_of(*words, "--return", "output", "--local")
        assert ("(bfloat16 as float32)" in printed) == (suffix == ".npz")
        if suffix == ".safetensors":
            out = safetensors.torch.load_file(target)["output"]
            assert out.dtype == torch.bfloat16
        elif suffix == ".npz":
            out = torch.from_numpy(read_tensors(target)["output"])
            assert out.dtype == torch.float32
        else:  # in just enough digits for a bfloat16
            out = torch.from_numpy(read_tensors(target)["output"]).bfloat16()
        assert torch.equal(out.double(), run.output.double())


@pytest.mark.usefixtures("delays")
def test_flags_override_the_environment(url: str, source: Path, tmp_path: Path) -> None:
    unused = f"http://127.0.0.1:{free_port()}"
    stdout_of("variants", "--url", url, QKV_URL=unused)
    stdout_of("variants", QKV_URL=url)
    stdout_of("variants", "--local", QKV_URL=unused)
    assert unused in error_of(tmp_path, "variants", QKV_URL=unused)
    assert unused in error_of(tmp_path, "variants", "--url", unused, QKV_URL=url)
    (option,) = (p for p in main.commands["variants"].params if p.name == "url")
    assert option.default == "http://127.0.0.1:8000"  # a service may run there


@pytest.mark.parametrize(
    "parameters",
    [
        {"causal": True, "query_offset": "end"},
        {"window": [2, 0], "scale": 0.5},
        {"softcap": 2.5, "scale": None},
        {"dropout": 0.5, "seed": 7},
    ],
)
def test_parameters_are_json_or_words(
    url: str, source: Path, tmp_path: Path, parameters: dict[str, Any]
) -> None:
    flags: list[str] = []
    for name, value in parameters.items():
        flags += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), **parameters)
    stdout_of("attend", "softmax", source, "-o", tmp_path / "o.npz", *flags, "--local")
    assert_same_bits(read_tensors(tmp_path / "o.npz"), run.outputs)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_flags_override_the_fields_of_the_file(url: str, tmp_path: Path, suffix: str) -> None:
    fields = {
        "parameters": {"causal": True, "scale": 3.0},
        "outputs": ["scores"],
        "weights": "none",
    }
    source = write_tensors(tmp_path / f"in{suffix}", "inputs", tensors(), **fields)
    flags = ("-p", "scale=0.25", "--return", "output", "--return", "weights", "--weights", "full")
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), causal=True, scale=0.25)
    stdout_of("attend", "softmax", source, "-o", tmp_path / "o.npz", *flags, "--local")
    assert_same_bits(read_tensors(tmp_path / "o.npz"), run.outputs)


def test_flags_choose_the_written_outputs(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    for flags, names in (
        ((), {"output", "weights"}),
        (("--weights", "none"), {"output"}),
        (("--return", "scores"), {"scores"}),
        (("--weights", "top_k=2"), {"output", "weights", "indices"}),
        (("--weights", "rows=0,2", "--return", "weights"), {"weights"}),
        (("--weights", "rows=0"), {"output", "weights"}),
        (("--weights", "pool=2"), {"output", "weights"}),
        (("--return", "output", "--return", "scores"), {"output", "scores"}),
    ):
        stdout_of("attend", "softmax", source, "-o", target, "--local", *flags)
        assert read_tensors(target).keys() == names


def weights_v2(dtype: str = "float32", bias: bool = False) -> dict[str, Array]:
    """Returns the weights of a layer of layout v2 with 6 inputs and 4 outputs."""
    weights = {}
    for i, role in enumerate(("query", "key", "value")):
        weights[f"W_{role}.weight"] = normal(4, 6, seed=10 + i).astype(dtype)
        if bias:
            weights[f"W_{role}.bias"] = normal(4, seed=20 + i).astype(dtype)
    return weights


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_layer_in_a_file_projects_the_inputs(url: str, tmp_path: Path, suffix: str) -> None:
    x, weights = normal(2, 5, 6), weights_v2(bias=True)
    arrays = {"x": x} | {f"layer.{name}": array for name, array in weights.items()}
    source = write_tensors(tmp_path / f"in{suffix}", "inputs", arrays)
    target = tmp_path / f"out{suffix}"
    with Client(url) as client:
        run = client.attend(
            "softmax", x=x, layer={"layout": "v2", "heads": 2, "tensors": weights}, causal=True
        )
    flags = ("--layout", "v2", "--heads", "2", "-p", "causal=true", "--local")
    stdout_of("attend", "softmax", source, "-o", target, *flags)
    assert_same_bits(read_tensors(target), run.outputs)


def test_layer_flags_override_the_layer_of_the_file(tmp_path: Path) -> None:
    arrays = {"x": normal(2, 5, 6)} | {f"layer.{n}": a for n, a in weights_v2().items()}
    layer = {"layout": "v1", "heads": 4}
    source = write_tensors(tmp_path / "in.json", "inputs", arrays, layer=layer)
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    stdout_of(*words, "--layout", "v2")
    assert read_tensors(tmp_path / "out.npz")["weights"].shape == (2, 4, 5, 5)
    stdout_of(*words, "--layout", "v2", "--heads", "2")
    assert read_tensors(tmp_path / "out.npz")["weights"].shape == (2, 2, 5, 5)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_layer_flags_select_a_layer_of_a_model(url: str, tmp_path: Path, suffix: str) -> None:
    """The buffers of the model are left out."""
    state = {n: t.numpy() for n, t in llama(num_hidden_layers=2).state_dict().items()}
    state["model.layers.1.self_attn.mask"] = np.ones((2, 2), np.uint8)
    x, prefix = normal(1, 5, 32), "model.layers.1.self_attn"
    arrays = {"x": x} | {f"layer.{name}": array for name, array in state.items()}
    source = write_tensors(tmp_path / f"in{suffix}", "inputs", arrays)
    layer = {"layout": "auto", "prefix": prefix, "heads": 4, "kv_heads": 2, "tensors": state}
    layer |= {"rope": {"base": 500.0}, "alibi": True}
    with Client(url) as client:
        run = client.attend("softmax", x=x, layer=layer)
    flags = ("--layout", "auto", "--prefix", prefix, "--heads", "4", "--kv-heads", "2", "--rope",
             '{"base": 500}', "--alibi", "plain", "--local")  # fmt: skip
    target = tmp_path / "out.npz"
    stdout_of("attend", "softmax", source, "-o", target, *flags)
    assert_same_bits(read_tensors(target), run.outputs)
    for flag, value in (("--rope", '{"base": 0}'), ("--kv-heads", "3"), ("--prefix", "model.7")):
        words = ("attend", "softmax", source, "-o", target, *flags, flag, value)
        assert flag in error_of(tmp_path, *words)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_conversion_there_and_back_keeps_every_bit(tmp_path: Path, suffix: str, dtype: str) -> None:
    weights = weights_v2(dtype)
    fields = {"dtype": dtype} if suffix == ".json" else {}
    v2 = write_tensors(tmp_path / f"v2{suffix}", "tensors", weights, **fields)
    v1, back = tmp_path / f"v1{suffix}", tmp_path / f"back{suffix}"
    printed = stdout_of("convert", v2, "--from", "v2", "--to", "v1", "-o", v1, "--local")
    assert "differ by" in printed
    stdout_of("convert", v1, "--from", "v1", "--to", "v2", "-o", back, "--local")
    assert_same_bits(
        read_tensors(v1, "tensors"),
        {n.removesuffix(".weight"): a.T.copy() for n, a in weights.items()},
    )
    assert_same_bits(read_tensors(back, "tensors"), weights)
    if suffix != ".json" or dtype == "float64":  # float32 lists have no dtype
        assert all(a.dtype == dtype for a in read_tensors(back, "tensors").values())


def test_bias_is_refused_or_converted_exactly(url: str, tmp_path: Path) -> None:
    weights = weights_v2(bias=True)
    v2 = write_tensors(tmp_path / "v2.safetensors", "tensors", weights)
    words = ("convert", v2, "--from", "v2", "--to", "v1", "--local")
    for flags in ((), ("--bias", "refuse")):
        line = error_of(tmp_path, *words, "-o", tmp_path / "v1.npz", *flags)
        assert "(W_query.bias in v2.safetensors)" in line
        assert 'Set "bias" to "augment"' in line
    stdout_of(*words, "-o", tmp_path / "v1.npz", "--bias", "augment")
    with Client(url) as client:
        converted = client.convert(weights, source="v2", target="v1", bias="augment")
    assert_same_bits(read_tensors(tmp_path / "v1.npz"), converted.tensors)


def test_link_is_kept_and_its_target_replaced(source: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.npz", tmp_path / "link.npz"
    real.write_bytes(b"old")
    link.symlink_to(real)
    stdout_of("attend", "softmax", source, "-o", link, "--local")
    assert link.is_symlink()
    assert read_tensors(real).keys() == {"output", "weights"}


def test_local_catalogue_is_that_of_the_service(url: str, tmp_path: Path) -> None:
    for name in ((), ("softmax",)):
        texts = {stdout_of("variants", *name, *target_options(place, url)) for place in TARGETS}
        (text,) = texts
        assert re.search(r"^softmax\b", text, re.MULTILINE)
    assert all(word in text for word in ("formula", "arXiv", "query_offset", "(B, H, L, D)"))
    for place in TARGETS:
        line = error_of(tmp_path, "variants", "soft", *target_options(place, url))
        assert "'soft'" in line
        assert "softmax" in line


def test_help_lists_every_flag_within_80_columns() -> None:
    top = stdout_of("--help")
    for name, command in main.commands.items():
        text = stdout_of(name, "--help")
        assert text == stdout_of(name, "-h")
        assert max(map(len, (top + text).splitlines())) <= 80
        assert f"  {name} " in top
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name}: {option.name}"
                assert all(flag in text for flag in option.opts)
    assert "..." not in top.replace("[ARGS]...", "")
