"""The command detect, with a real service and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qkv import Client
from support.checkpoints import llama
from support.commands import (
    SUFFIXES,
    TARGETS,
    error_of,
    normal,
    stdout_of,
    target_options,
    write_tensors,
)
from support.known_requests import Array

PREFIX = "encoder.3"


def layer() -> dict[str, Array]:
    """Returns a layer of a model."""
    return {
        f"{PREFIX}.W_{role}.weight": normal(8, 8, seed=i)
        for i, role in enumerate(("query", "key", "value"))
    }


def files(url: str, folder: Path, suffix: str) -> tuple[Path, Path]:
    """Returns files of the layer and of a check, the output of four causal heads."""
    x, tensors = normal(5, 8, seed=4), layer()
    sent = {"layout": "v2", "heads": 4, "tensors": tensors}
    with Client(url) as client:
        y = client.attend("softmax", x=x, layer=sent, causal=True, outputs=["output"]).output
    return (
        write_tensors(folder / f"model{suffix}", "tensors", tensors),
        write_tensors(folder / f"xy{suffix}", "tensors", {"x": x, "y": y}),
    )


@pytest.mark.parametrize("place", TARGETS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_table_and_json_have_the_best_candidate_first(
    url: str, tmp_path: Path, suffix: str, place: str
) -> None:
    model, check = files(url, tmp_path, suffix)
    words = ("detect", model, "--prefix", PREFIX, "--check", check, *target_options(place, url))
    head, *rows = stdout_of(*words).splitlines()
    best, *others = (row for row in rows if row.endswith(tuple("0123456789")))
    assert head.split() == ["layout", "heads", "kv_heads", "positions", "scale", "causal", "error"]
    assert best.split()[:6] == ["v2", "4", "4", "none", "0.7071", "yes"]
    assert len(others) == 9
    detected = json.loads(stdout_of(*words, "--json", "--heads", "4"))["detected"]
    assert (detected[0]["layout"], detected[0]["causal"]) == ("v2", True)
    assert detected[0]["error"] < 1e-5 < detected[1]["error"]


def test_errors_name_flags_and_files(url: str, tmp_path: Path) -> None:
    model, check = files(url, tmp_path, ".safetensors")
    words = ("detect", model, "--local", "--prefix", PREFIX)
    assert "expected the tensors x and y" in error_of(tmp_path, *words, "--check", model)
    line = error_of(tmp_path, *words, "--check", check, "--heads", "3")
    assert "does not split into heads" in line
    assert "(--heads)" in line
    assert "(--rope)" in error_of(tmp_path, *words, "--check", check, "--rope", '{"base": 0}')
    zeros = write_tensors(
        tmp_path / "zeros.npz", "tensors", {"x": normal(5, 8), "y": 0 * normal(5, 8)}
    )
    assert "check.y is all zeros" in error_of(tmp_path, *words, "--check", zeros)


def test_layer_of_a_checkpoint_is_read_alone(tmp_path: Path) -> None:
    """The model is in several files."""
    model = llama(num_hidden_layers=2)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    prefix, x = "model.layers.1.self_attn", torch.from_numpy(normal(1, 6, 32))
    layer_of_model = model.model.layers[1].self_attn.eval()
    with torch.no_grad():
        rotations = model.model.rotary_emb(x, torch.arange(6)[None])
        y = layer_of_model(x, rotations, torch.full((6, 6), -torch.inf).triu(1)[None, None])[0]
    check = write_tensors(tmp_path / "xy.npz", "tensors", {"x": x.numpy(), "y": y.numpy()})
    words = ("detect", tmp_path, "--check", check, "--json", "--local")
    best = json.loads(stdout_of(*words, "--prefix", prefix))["detected"][0]
    found = tuple(best[name] for name in ("layout", "heads", "kv_heads", "causal"))
    assert found == ("llama", 4, 2, True)
    assert best["error"] < 1e-5
    assert "there are 2 layers" in error_of(tmp_path, *words)


def test_prefix_is_that_of_whole_names(url: str, tmp_path: Path) -> None:
    """layers.10 is not below layers.1, also in a file that has more than a request may have."""
    _, check = files(url, tmp_path, ".safetensors")
    names = {name.removeprefix(f"{PREFIX}."): array for name, array in layer().items()}
    state = {f"layers.{i}.{n}": a for i in range(1, 100) for n, a in names.items()}
    model = write_tensors(tmp_path / "deep.safetensors", "tensors", state)
    words = ("detect", model, "--check", check, "--json", "--prefix", "layers.1")
    best = json.loads(stdout_of(*words, "--url", url))["detected"][0]
    assert (best["layout"], best["heads"], best["causal"]) == ("v2", 4, True)
