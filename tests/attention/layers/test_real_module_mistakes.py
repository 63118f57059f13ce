"""Mistakes with real checkpoints are errors that name the tensor; nothing is wrong in silence."""

from __future__ import annotations

from typing import Final

import httpx
import pytest
import torch

from support import real_module_calls as calls
from support.real_module import largest_error
from support.real_modules import find
from support.service import Server

# building the models imports transformers and timm, which takes seconds
pytestmark = pytest.mark.slow

MATRICES: Final = {
    "mha": ("in_proj_weight", "out_proj.weight"),
    "mha-widths": ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"),
    "gpt2": ("c_attn.weight", "c_proj.weight"),
    "nanogpt": ("c_attn.weight", "c_proj.weight"),
    "bert": ("self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"),
    "llama": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    "meta": ("wq.weight", "wk.weight", "wv.weight", "wo.weight"),
    "phi3": ("qkv_proj.weight", "o_proj.weight"),
    "codegen": ("qkv_proj.weight", "out_proj.weight"),
    "neox": ("query_key_value.weight", "dense.weight"),
    "falcon-new": ("query_key_value.weight", "dense.weight"),
    "timm": ("qkv.weight", "proj.weight"),
}
each_matrix = pytest.mark.parametrize(
    ("name", "matrix"), [(name, m) for name, matrices in MATRICES.items() for m in matrices]
)


def detail(response: httpx.Response) -> str:
    assert response.status_code == 422, response.text
    problem = response.json()
    assert problem["pointer"].startswith("/layer")
    found: str = problem["detail"]
    return found


def whole_name(name: str, tensor: str) -> str:
    prefix = find(name).layer["prefix"]
    return f"{prefix}.{tensor}" if prefix else tensor


@each_matrix
def test_matrix_of_zeros_is_an_error_that_names_it(server: Server, name: str, matrix: str) -> None:
    case = find(name)
    sent = whole_name(name, matrix)
    tensors = case.tensors | {sent: torch.zeros_like(case.tensors[sent])}
    assert f"{sent} is all zeros" in detail(calls.run(server.http, case, tensors=tensors))


@pytest.mark.parametrize("role", [0, 1, 2])
@pytest.mark.parametrize("name", ["mha", "gpt2", "nanogpt", "phi3", "neox", "falcon-new", "timm"])
def test_part_of_a_fused_matrix_that_is_zeros_is_named(
    server: Server, name: str, role: int
) -> None:
    """Keys and values that were never loaded are zeros in a matrix that is not."""
    case = find(name)
    sent = whole_name(name, MATRICES[name][0])
    weight = case.tensors[sent].clone()
    heads, groups = case.fields["heads"], case.fields.get("kv_heads", case.fields["heads"])
    if name in ("neox", "falcon-new"):
        each = heads // groups
        rows = weight.unflatten(0, (groups, each + 2, -1))
        rows[:, (slice(0, each), each, each + 1)[role]] = 0
    else:
        rows = weight.T if name == "gpt2" else weight
        D = len(rows) // (heads + 2 * groups)
        starts = (0, heads * D, (heads + groups) * D, len(rows))
        rows[starts[role] : starts[role + 1]] = 0
    part = ("query", "key", "value")[role]
    response = calls.run(server.http, case, tensors=case.tensors | {sent: weight})
    assert f"{sent} is all zeros in its {part} part" in detail(response)


@each_matrix
def test_missing_matrix_is_an_error_that_names_it(server: Server, name: str, matrix: str) -> None:
    """The output projection may be absent, and then the heads stay side by side."""
    case = find(name)
    sent = whole_name(name, matrix)
    without = {n: t for n, t in case.tensors.items() if n != sent}
    response = calls.run(server.http, case, tensors=without)
    is_output = matrix == MATRICES[name][-1]
    if is_output and f"{sent.removesuffix('weight')}bias" not in without:
        assert response.is_success
        return
    found = detail(response)
    assert sent in found or (is_output and f"{sent.removesuffix('weight')}bias" in found)


def test_biases_of_zeros_are_no_error(server: Server) -> None:
    case = find("bert")
    names = [n for n in case.tensors if n.endswith(".bias")]
    tensors = case.tensors | {n: torch.zeros_like(case.tensors[n]) for n in names}
    assert calls.run(server.http, case, tensors=tensors).is_success


def test_integer_buffers_of_a_state_dict_are_ignored(server: Server) -> None:
    """Models keep positions and counts beside their weights."""
    case = find("gpt2")
    others = {
        "h.1.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
        "position_ids": torch.arange(64),
    }
    response = calls.run(server.http, case, tensors=case.tensors | others)
    assert response.is_success, response.text
    assert response.json()["layer"]["ignored"] == ["h.1.attn.bias", "h.1.attn.masked_bias"]


def test_unknown_prefix_is_an_error_with_an_example(server: Server) -> None:
    case = find("llama")
    found = detail(calls.run(server.http, case, prefix="model.layers.7.self_attn"))
    assert "prefix fits no tensor: got 'model.layers.7.self_attn'" in found


def test_tiled_heads_give_another_output(server: Server) -> None:
    """Key heads are repeated for their query heads; tiles would be in another order."""
    case = find("llama")
    prefix = case.layer["prefix"]
    tiled = {
        name: case.tensors[name].tile(2, 1)
        for name in (f"{prefix}.k_proj.weight", f"{prefix}.v_proj.weight")
    }
    found = calls.output(server.http, case, tensors=case.tensors | tiled, kv_heads=None)
    assert largest_error(found, case.truth.output) > 100 * calls.bound(case)
