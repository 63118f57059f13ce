"""Gradients of softmax with slopes of ALiBi and sinks, against autograd of the textbook."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.common.dropout import keep_mask
from qkv.attention.variants import softmax
from support.dtypes import DTYPES, exact_dtype
from support.each import each
from support.head_terms import textbook
from support.references import reference_of
from support.variant_calls import gradients

B, H, G, L, S = 2, 4, 2, 6, 9
FAMILIES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"causal": True},
    {"causal": True, "query_offset": "end"},
    {"causal": True, "query_offset": -3},
    {"window": (2, 1), "query_offset": 2},
    {"softcap": 1.5, "scale": -0.7},
    {"dropout": 0.4, "seed": 2**40},
    {"causal": True, "query_offset": 3, "softcap": 0.8, "window": (4, None), "dropout": 0.2},
)
NAMES: Final = {
    "query_BHLD": "query", "key_BGSD": "key", "value_BGSE": "value", "mask_BHLS": "mask",
    "alibi_slopes_H": "alibi_slopes", "sinks_H": "sinks",
}  # fmt: skip


def inputs_of(**extra: Tensor) -> dict[str, Tensor]:
    """Returns normal tensors by argument, slopes and sinks among them, in float64."""
    shapes = {
        "query_BHLD": (B, H, L, 5), "key_BGSD": (B, G, S, 5), "value_BGSE": (B, G, S, 3),
        "alibi_slopes_H": (H,), "sinks_H": (H,),
    }  # fmt: skip
    return {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()} | extra


@each("dtype", DTYPES)
@each("parameters", FAMILIES)
def test_infinite_sinks_have_gradients_of_all_or_nothing(
    dtype: torch.dtype, parameters: dict[str, Any]
) -> None:
    """Beside a sink of inf every gradient is 0; one of -inf has the gradients without a sink."""
    mask = torch.randn(B, H, L, S).masked_fill_(torch.rand(B, H, L, S) > 0.7, -math.inf)
    tensors: dict[str, Any] = {n: x.to(dtype) for n, x in inputs_of(mask_BHLS=mask).items()}
    grad = torch.randn(B, H, L, 3).to(dtype)
    infinite = torch.tensor([math.inf, math.inf, -math.inf, -math.inf]).to(dtype)
    found = softmax.backward(softmax.Call(**tensors | {"sinks_H": infinite}, **parameters), grad)
    del tensors["sinks_H"]
    plain = softmax.backward(softmax.Call(**tensors, **parameters), grad)
    assert not found.pop("sinks").any()
    for name, gradient in found.items():
        axis = 0 if name == "alibi_slopes" else 1
        first, last = gradient.chunk(2, axis)  # heads 0 and 1 read key head 0
        assert not first.any(), name
        expected = plain[name].chunk(2, axis)[1].double()
        close = 1e3 * torch.finfo(exact_dtype(dtype)).eps * (1 + float(expected.abs().max()))
        assert float((last - expected).abs().max()) <= close, name


def derivatives(
    tensors: dict[str, Tensor], grad: Tensor, parameters: dict[str, Any]
) -> dict[str, Tensor]:
    """Returns the gradients by wire name, by autograd of the textbook in float64.

    The visible keys are those of the reference. Rows that see no key are left out: without a sink,
    their textbook softmax is NaN.
    """
    every: dict[str, Any] = {**tensors, **parameters}
    known = reference_of(softmax.Call(**every)).scores
    assert known is not None
    visible = known > -torch.inf
    blind = ~visible.any(-1, keepdim=True)
    kept = None
    if dropout := parameters.get("dropout", 0.0):
        planes, block = torch.arange(B * H).view(B, H), (slice(0, L), slice(0, S))
        kept = keep_mask(dropout, parameters.get("seed", 0), planes, *block).double()
        kept /= 1 - dropout
    leaves = {n: t.double().requires_grad_() for n, t in tensors.items() if t.is_floating_point()}
    output = textbook(
        tensors | leaves, visible | blind, parameters.get("scale", 5**-0.5),
        parameters.get("softcap"), kept, parameters.get("query_offset", 0),
    )  # fmt: skip
    output = output.masked_fill(blind, 0.0)
    found = torch.autograd.grad(output, list(leaves.values()), grad.double())
    return {NAMES[n]: x for n, x in zip(leaves, found, strict=True)}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], eps: float) -> None:
    """Each gradient is a sum of at most B L S terms, as large as the largest gradient."""
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        close = 100 * eps * max(1.0, float(truth[name].abs().max()))
        torch.testing.assert_close(gradient.double(), truth[name], rtol=0, atol=close)


@each("dtype", DTYPES[1:])
@each("parameters", FAMILIES)
def test_narrow_dtypes(dtype: torch.dtype, parameters: dict[str, Any]) -> None:
    """The truth is of the rounded inputs; all sums are float32 at least."""
    tensors = {n: t.to(dtype) for n, t in inputs_of().items()}
    grad = torch.randn(B, H, L, 3).to(dtype)
    found = gradients("softmax", grad, tensors, parameters)
    truth = derivatives({n: t.double() for n, t in tensors.items()}, grad, parameters)
    assert_close(found, truth, 4 * torch.finfo(torch.float32).eps)


@each("dtype", [torch.float32, torch.float64])
@each("sink", [-1e4, -300.0, 0.0, 300.0, 1e4, 1e30])
def test_extreme_sinks(dtype: torch.dtype, sink: float) -> None:
    tensors = {n: t.to(dtype) for n, t in inputs_of().items()}
    tensors["sinks_H"] = torch.tensor([sink, 0.0, -sink, 1.0], dtype=dtype)
    grad = torch.randn(B, H, L, 3).to(dtype)
    found = gradients("softmax", grad, tensors, {})
    truth = derivatives({n: t.double() for n, t in tensors.items()}, grad, {})
    assert_close(found, truth, 4 * torch.finfo(dtype).eps)


@each("offset", [10**6, -(10**6)])
def test_positions_far_from_all_keys(offset: int) -> None:
    """A gradient of slopes is a sum of differences: without sinks it depends on no offset."""
    tensors = {n: t.float() for n, t in inputs_of().items() if n != "sinks_H"}
    grad = torch.randn(B, H, L, 3)
    found = gradients("softmax", grad, tensors, {"query_offset": offset})
    truth = derivatives({n: t.double() for n, t in tensors.items()}, grad, {})
    assert_close(found, truth, 4 * torch.finfo(torch.float32).eps)


@each(("dtype", "size"), [(torch.float32, 1e37), (torch.float64, 1e300), (torch.float64, 1e20)])
def test_huge_values_scale_the_gradients(dtype: torch.dtype, size: float) -> None:
    """Powers of two in and out; a gradient is infinite only if its true size is."""
    factor = 2.0 ** math.floor(math.log2(size))
    tensors = {n: t.to(dtype) for n, t in inputs_of().items()}
    grad = torch.randn(B, H, L, 3).to(dtype)
    truth = gradients("softmax", grad.double(), {n: t.double() for n, t in tensors.items()}, {})
    tensors["value_BGSE"] *= factor
    found = gradients("softmax", grad / factor, tensors, {})
    for name in ("sinks", "alibi_slopes", "query", "key"):
        close = 1e3 * torch.finfo(dtype).eps * float(truth[name].abs().max())
        torch.testing.assert_close(found[name].double(), truth[name], rtol=0, atol=close)


@each("sign", [1.0, -1.0])
def test_steep_slopes_of_float64(sign: float) -> None:
    """The product of slope and distance overflows float64, but the weights are those of one key."""
    tensors = inputs_of()
    tensors["alibi_slopes_H"] = torch.full((H,), sign * 1e308, dtype=torch.float64)
    tensors.pop("sinks_H")
    grad = torch.randn(B, H, L, 3, dtype=torch.float64)
    found = gradients("softmax", grad, tensors, {})
    only = S - 1 if sign > 0 else 0
    expected = torch.zeros(B, G, S, 3, dtype=torch.float64)
    expected[:, :, only] = grad.sum(2).unflatten(1, (G, -1)).sum(2)
    torch.testing.assert_close(found["value"], expected, rtol=1e-14, atol=1e-14)
    for name in ("query", "key", "alibi_slopes"):
        assert not found[name].any()
