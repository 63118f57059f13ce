"""Tests of the proof of calls of `nn.MultiheadAttention`: two runs return the same.

The module computes in one operator, or with weights; the captured heads are of a second run.
"""

from __future__ import annotations

import itertools
import math
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import qkv
from qkv.models.capture import CaptureWarning
from support.captured_models import capture

M, HEADS = 16, 4
NOT_RETURNED = "its module did not return the projected outputs of its heads"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_module(choose: random.Random, dtype: torch.dtype) -> nn.MultiheadAttention:
    H, D = choose.choice([1, 2, 3, 4]), choose.choice([1, 4, 8, 32])
    is_narrow = choose.random() < 0.25
    module = nn.MultiheadAttention(
        H * D, H, dropout=choose.choice([0.0, 0.0, 0.1]), bias=choose.random() < 0.8,
        add_bias_kv=choose.random() < 0.2, add_zero_attn=choose.random() < 0.2,
        batch_first=choose.random() < 0.6, kdim=H * D + 3 if is_narrow else None,
        vdim=H * D + 5 if is_narrow else None,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
            parameter.mul_(choose.choice([0.3, 1.0, 3.0]) * parameter.shape[-1] ** -0.5)
    return module.to(dtype).train(choose.random() < 0.25)


def random_call(
    choose: random.Random, module: nn.MultiheadAttention, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    B, L, S = choose.choice([1, 2, 5]), choose.choice([1, 2, 7, 20]), choose.choice([1, 3, 9, 25])
    size = choose.choice([0.1, 1.0, 4.0])
    is_self = choose.random() < 0.6 and module._qkv_same_embed_dim
    S = L if is_self else S
    shapes = [(B, L, module.embed_dim), (B, S, module.kdim), (B, S, module.vdim)]
    inputs = [(torch.randn(shape) * size).to(dtype) for shape in shapes]
    inputs = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
    inputs = inputs[:1] * 3 if is_self else inputs
    options: dict[str, Any] = {
        "need_weights": choose.random() < 0.5, "average_attn_weights": choose.random() < 0.5
    }  # fmt: skip
    bias = torch.randn(L, S) * choose.choice([1.0, 10.0])
    hidden = torch.randn(B * module.num_heads, L, S) > 0.5
    hidden[..., 0] = False
    causal = torch.ones(L, S).triu(1).bool()
    kinds = [None, {"attn_mask": bias.to(dtype)}, {"attn_mask": hidden}, {"attn_mask": hidden[0]}]
    options |= (
        choose.choice([*kinds, {"attn_mask": causal, "is_causal": choose.random() < 0.5}]) or {}
    )
    if choose.random() < 0.4 and options.get("attn_mask", hidden).dtype == torch.bool:
        padding = torch.zeros(B, S, dtype=torch.bool)
        padding[-1, S // 2 + 1 :] = True
        options["key_padding_mask"] = padding
    return inputs, options


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_two_runs_is_no_difference(dtype: torch.dtype) -> None:
    choose = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        module = random_module(choose, dtype)
        inputs, options = random_call(choose, module, dtype)
        with torch.set_grad_enabled(choose.random() < 0.3):
            calls = capture(module, *inputs, **options)
        assert (len(calls), calls.missed) == (1, []), (module, options)


def own_attention(
    x: Tensor, module: nn.MultiheadAttention, mask: Tensor | None, scale: float
) -> Tensor:
    """Computes self-attention of a module in code of its own, with a boolean mask as 0 and 1."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    query, key, value = (
        nn.functional.linear(x, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    )
    scores = query @ key.mT * scale
    scores = scores if mask is None else scores + mask
    output: Tensor = module.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    return output


class AddedMask(nn.MultiheadAttention):
    """A module that adds a boolean mask as 0 and 1."""

    def forward(self, x: Tensor, *_: Any, **options: Any) -> Any:  # type: ignore[override]
        return own_attention(x, self, options.get("attn_mask"), (M // HEADS) ** -0.5), None


class OtherScale(nn.MultiheadAttention):
    """A module with another scale."""

    def forward(self, x: Tensor, *_: Any, **options: Any) -> Any:  # type: ignore[override]
        return own_attention(x, self, None, 1.0), None


def replaced(kind: type[nn.MultiheadAttention]) -> Callable[..., nn.MultiheadAttention]:
    """Returns a function that builds a module of torch whose own `forward` is another one."""

    def build(*args: Any, **options: Any) -> nn.MultiheadAttention:
        module = nn.MultiheadAttention(*args, **options)
        vars(module)["forward"] = types.MethodType(kind.forward, module)
        return module

    return build


WRONG: dict[str, Callable[..., nn.MultiheadAttention]] = {
    "mask of 0 and 1, subclass": AddedMask,
    "mask of 0 and 1, replaced": replaced(AddedMask),
    "another scale, subclass": OtherScale,
    "another scale, replaced": replaced(OtherScale),
}


class Model(nn.Module):
    """A captured module beside another."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(
            M, HEADS, batch_first=True, dtype=attention.out_proj.weight.dtype
        )
        self.second = attention

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor]:
        for attend in (self.first, self.second):
            x = x + attend(x, x, x, attn_mask=mask)[0]
        return (x,)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_module_that_does_something_else_is_named_and_not_used(
    name: str, dtype: torch.dtype, training: bool
) -> None:
    model = Model(WRONG[name](M, HEADS, batch_first=True, dtype=dtype)).train(training)
    x, mask = torch.randn(2, 5, M).to(dtype), torch.ones(5, 5).triu(1).bool()
    with torch.no_grad():
        calls = capture(model, x, mask)
    assert calls.layers == ["first"]
    assert [missed.layer for missed in calls.missed] == ["second"]
    with pytest.raises(qkv.errors.InvalidContent, match="second was not captured"):
        calls.rollout()


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "gated": lambda y, run: y * 0.9,
    "not a number": lambda y, run: y * math.nan,
    "another scale each time": lambda y, run: y * (1 + 0.1 * run),
}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", CHANGES)
def test_heads_are_recorded_unless_the_second_run_returns_something_else(
    name: str, dtype: torch.dtype
) -> None:
    module = nn.MultiheadAttention(M, HEADS, batch_first=True, dtype=dtype).eval()
    original, runs = module.forward, itertools.count()
    vars(module)["forward"] = lambda *args, **options: (
        CHANGES[name](original(*args, **options)[0], next(runs) % 3), None
    )  # fmt: skip
    x = torch.randn(2, 5, M).to(dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        with qkv.capture(module) as calls:
            module(x, x, x)
    is_missed = name == "another scale each time"
    assert calls.missed == [("", NOT_RETURNED)] * is_missed
    assert len(calls) == 1 - is_missed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_weights", [True, False])
def test_hint_of_causality_that_is_wrong_is_recorded_as_it_acts_or_named(
    needs_weights: bool, dtype: torch.dtype
) -> None:
    """torch reads the hint in some cases, and the mask in the others."""
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[:, 4] = True
    options = {"attn_mask": hidden, "is_causal": True, "need_weights": needs_weights}
    for is_self in (True, False):
        module = nn.MultiheadAttention(M, HEADS, batch_first=True, dtype=dtype).eval()
        x, y = (torch.randn(2, 5, M).to(dtype) for _ in range(2))
        inputs = (x, x, x) if is_self else (x, y, y)
        with torch.no_grad():
            expected = module(*inputs, **options)[0]
            calls = capture(module, *inputs, **options)
        if calls.missed:
            assert calls.missed == [("", NOT_RETURNED)]
            assert (needs_weights, is_self) == (False, True)
            continue
        output = calls[0].run("softmax", outputs=["output"]).output
        merged = output.transpose(1, 2).flatten(2).to(dtype)
        bound = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(module.out_proj(merged), expected, atol=bound, rtol=0)


def test_forward_of_other_arguments_or_results_keeps_them() -> None:
    x = torch.randn(2, 5, M)
    one, bare = (nn.MultiheadAttention(M, HEADS, batch_first=True).eval() for _ in range(2))
    original = bare.forward
    vars(one)["forward"] = lambda x: nn.functional.scaled_dot_product_attention(x, x, x)
    vars(bare)["forward"] = lambda *args, **options: original(*args, **options)[0]
    with torch.no_grad():
        for module, arguments in ((one, [x]), (bare, [x, x, x])):
            calls = capture(module, *arguments)
            assert (len(calls), calls.missed) == (1, [])
    with pytest.raises(TypeError, match="2 required positional arguments"), qkv.capture(bare):
        bare(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["module", "layer"])
@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")])
def test_tensors_without_numbers_are_reported(
    context: Callable[[], Any], kind: str, training: bool
) -> None:
    with context(), torch.no_grad():
        module = nn.MultiheadAttention(M, HEADS, dropout=0.1, batch_first=True).train(training)
        layer = nn.TransformerEncoderLayer(M, HEADS, 24, batch_first=True).train(training)
        x, mask = torch.randn(2, 5, M), torch.zeros(5, 5)
        with pytest.warns(CaptureWarning, match="no numbers"):  # noqa: SIM117
            with qkv.capture(layer if kind == "layer" else module) as calls:
                layer(x, mask) if kind == "layer" else module(x, x, x, attn_mask=mask)
    assert len(calls) == 0
