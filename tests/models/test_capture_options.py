"""Tests of the options of `qkv.capture`: layers, heads and the budget; and of its copies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.errors import InvalidContent
from qkv.models.capture import CaptureWarning
from support.captured_models import (
    FAMILIES,
    PlainAttention,
    assert_repeats,
    build,
    run_model,
    state_of,
)  # fmt: skip


@pytest.mark.parametrize("layers", [["nothing"], ["model.layers.7"], "model.layers.0"])
def test_unknown_layer_is_an_error_by_name(layers: Any) -> None:
    with (
        pytest.raises(InvalidContent, match=r"nothing|layers"),
        qkv.capture(build("llama", "sdpa"), layers=layers),
    ):
        pass


def test_chosen_layer_without_a_call_is_reported() -> None:
    model = build("llama", "sdpa")
    layers = ["model.layers.1", "model.embed_tokens"]
    missed = "model.embed_tokens: it made no attention call"
    with pytest.warns(CaptureWarning, match=missed), qkv.capture(model, layers=layers) as calls:
        run_model(model, FAMILIES["llama"].batch())
    assert calls.layers == ["model.layers.1.self_attn"]
    assert [each.layer for each in calls.missed] == ["model.embed_tokens"]
    with pytest.warns(CaptureWarning), qkv.capture(model, layers=layers) as calls:
        pass  # the model does not run
    assert [each.layer for each in calls.missed] == layers


def test_chosen_layer_beyond_the_budget_has_one_reason() -> None:
    model = build("llama", "sdpa")
    with (
        pytest.warns(CaptureWarning, match="max_bytes"),
        qkv.capture(model, layers=["model.layers.1"], max_bytes=0) as calls,
    ):
        run_model(model, FAMILIES["llama"].batch())
    assert [each.layer for each in calls.missed] == ["model.layers.1.self_attn"]


@pytest.mark.parametrize("heads", [[-1], [0.5], ["a"], [True], [], [0, 0]])
def test_invalid_heads_are_an_error(heads: Any) -> None:
    with (
        pytest.raises(InvalidContent, match="heads is invalid"),
        qkv.capture(build("llama", "sdpa"), heads=heads),
    ):
        pass


def test_head_that_a_layer_lacks_is_an_error_by_name() -> None:
    model = build("llama", "sdpa")
    state = state_of(model)
    with (
        pytest.raises(InvalidContent, match=r"0 to 3 in model.layers.0.self_attn"),
        qkv.capture(model, heads=[4]),
    ):
        run_model(model, FAMILIES["llama"].batch())
    assert state_of(model) == state


@pytest.mark.parametrize("pattern", ["model.layers.1", "model.layers.1.self_attn", "*.1.*"])
def test_layers_select_calls(pattern: str) -> None:
    model = build("llama", "sdpa")
    with qkv.capture(model, layers=[pattern]) as calls:
        run_model(model, FAMILIES["llama"].batch())
    assert calls.layers == ["model.layers.1.self_attn"]


@pytest.mark.parametrize("heads", [[0], [3], [1, 2], [3, 2, 1, 0], [0, 1]])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_heads_select_query_heads_with_their_key_heads(name: str, heads: list[int]) -> None:
    model, batch = build(name, "eager"), FAMILIES[name].batch()
    with qkv.capture(model) as whole, qkv.capture(model, heads=heads) as calls:
        run_model(model, batch)
    for call, other in zip(calls, whole, strict=True):
        assert call.heads == tuple(heads)
        assert torch.equal(call.query, other.query[:, heads])
        assert torch.equal(call.output, other.output[:, heads])
        assert_repeats(call)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
def test_budget_is_kept_and_what_exceeds_it_is_reported(part: float) -> None:
    model, batch = build("t5", "eager"), FAMILIES["t5"].batch()
    with qkv.capture(model) as whole:
        run_model(model, batch)
    budget = int(whole.nbytes * part)
    with (
        warnings.catch_warnings(record=True) as caught,
        qkv.capture(model, max_bytes=budget) as calls,
    ):
        warnings.simplefilter("always")
        run_model(model, batch)
    assert calls.nbytes <= budget
    assert {*calls.layers, *(m.layer for m in calls.missed)} == set(whole.layers)
    assert all("max_bytes" in m.reason for m in calls.missed)
    assert bool(calls.missed) == bool(caught) == (part < 1)
    assert all(issubclass(w.category, CaptureWarning) for w in caught)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_share_the_copy_of_a_mask(name: str, implementation: str, mode: Any) -> None:
    model = build(name, implementation)
    with qkv.capture(model) as calls, mode():
        model(**FAMILIES[name].batch())
    first, second = calls
    assert first.mask is not None
    assert first.mask is second.mask
    assert calls.nbytes == first.nbytes + second.nbytes - first.mask.nbytes


def test_mask_that_is_changed_in_place_is_another_mask() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask[0, 4] = ~mask[0, 4]
        output: Tensor = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=True
        )
        return output

    model = nn.Sequential(PlainAttention(attend))
    with qkv.capture(model) as calls:
        model(torch.randn(2, 5, 16))
        model(torch.randn(2, 5, 16))
    masks = [call.mask for call in calls]
    assert masks[0] is not None
    assert masks[1] is not None
    assert not torch.equal(masks[0], masks[1])


def test_recorded_tensors_are_copies() -> None:
    x = torch.randn(2, 5, 16)
    module = PlainAttention()
    with qkv.capture(module) as calls:
        module(x)
    kept = calls[0].query.clone()
    with torch.no_grad():
        module.project.weight.zero_()
    assert torch.equal(calls[0].query, kept)
    assert calls[0].layer == ""
    assert not calls[0].query.requires_grad
