"""Tests of `qkv.capture` around the ways to run a model: generation, gradients, modes, threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qkv
from support.captured_models import (
    FAMILIES,
    LENGTH,
    WIDTH,
    PlainAttention,
    assert_repeats,
    build,
    state_of,
)

NEW_TOKENS: Final = 4


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_generation_is_captured_step_by_step(name: str, cache: str, implementation: str) -> None:
    model, batch = build(name, implementation), FAMILIES[name].batch()
    batch = {key: x.flip(1) for key, x in batch.items()}  # padding is on the left
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False,
        "cache_implementation": cache, "disable_compile": True,
    }  # fmt: skip
    expected = model.generate(**batch, **options)
    with qkv.capture(model) as calls:
        assert torch.equal(model.generate(**batch, **options), expected)
    assert calls.missed == []
    assert len(calls) == 2 * NEW_TOKENS
    steps = [calls.of_layer(layer) for layer in FAMILIES[name].layers]
    for layer in steps:
        assert [call.query.shape[2] for call in layer] == [LENGTH, *[1] * (NEW_TOKENS - 1)]
        for call in layer:
            assert_repeats(call)
        if cache == "dynamic" and name != "mistral":
            lengths = [LENGTH + step for step in range(NEW_TOKENS)]
            assert [call.key.shape[2] for call in layer] == lengths
            # a later key is appended: the recorded keys of each step are the first of the next
            for call, following in itertools.pairwise(layer):
                assert torch.equal(following.key[:, :, : call.key.shape[2]], call.key)
        if cache == "static" and name != "mistral":
            # the buffer is overwritten later, the recorded keys are not
            assert not layer[0].key[:, :, LENGTH:].any()
            assert layer[-1].key[:, :, LENGTH : LENGTH + NEW_TOKENS - 1].any(-1).all()


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the gradients of all parameters and of the input, in training mode."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    return [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]


class Checkpointed(nn.Module):
    """Runs its layers again in the backward pass."""

    def __init__(self, *layers: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layers' output."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.2, batch_first=True)


@pytest.mark.parametrize(
    "build_model",
    [
        lambda: nn.Sequential(PlainAttention(), encoder_layer()),
        lambda: Checkpointed(PlainAttention(), encoder_layer(), use_reentrant=False),
        lambda: Checkpointed(PlainAttention(), encoder_layer(), use_reentrant=True),
    ],
    ids=["plain", "checkpoint", "reentrant-checkpoint"],
)
def test_gradients_keep_their_bits(build_model: Callable[[], nn.Module]) -> None:
    model, x = build_model().train(), torch.randn(2, 5, WIDTH)
    state, expected = state_of(model), train(model, x)
    with qkv.capture(model) as calls:
        found = train(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(calls) == 2  # what the backward pass repeats is not recorded again
    assert calls.missed == []
    assert state_of(model) == state


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_of_a_model_of_transformers_keeps_its_bits(implementation: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        **FAMILIES["llama"].config, attention_dropout=0.1, attn_implementation=implementation
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = FAMILIES["llama"].batch()["input_ids"]

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    with qkv.capture(model) as calls:
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [call.layer for call in calls] == list(FAMILIES["llama"].layers)
    assert {call.dropout for call in calls} == {0.1}


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("cpu"),
        nullcontext,
    ],
    ids=["autocast", "inference", "no-grad", "device", "none"],
)
def test_contexts_of_torch_keep_their_effect(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    model = nn.Sequential(
        PlainAttention(), encoder_layer(), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    ).eval()
    model.forward = lambda x: model[2](*[model[1](model[0](x))] * 3)[0]  # type: ignore[method-assign]
    x = torch.randn(2, 5, WIDTH)
    with context():
        expected = model(x)
        with qkv.capture(model) as calls:
            found = model(x)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert calls.layers == ["0", "1.self_attn", "2"]
    assert calls.missed == []
    assert calls[0].query.dtype == (torch.bfloat16 if "autocast" in str(context()) else x.dtype)


def test_gradients_under_autocast_keep_their_bits() -> None:
    model = nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH, vdim=8, batch_first=True)
    x, value = torch.randn(2, 5, WIDTH), torch.randn(2, 5, 8)

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, x, value)[0].float().square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = step()
    with qkv.capture(model):
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_subclass_of_tensor_stays_what_it_is() -> None:
    class Named(Tensor):
        pass

    model = nn.Sequential(PlainAttention())
    x = torch.randn(2, 5, WIDTH).as_subclass(Named)
    expected = model(x)
    with qkv.capture(model) as calls:
        found = model(x)
    assert type(found) is type(expected) is Named
    assert torch.equal(found, expected)
    assert len(calls) == 1
