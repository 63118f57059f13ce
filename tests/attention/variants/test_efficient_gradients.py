"""Closed-form gradients of efficient attention, for keys of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.each import each
from support.variant_calls import EPS, gradients, random_inputs


def efficient_plainly(query: Tensor, key: Tensor, value: Tensor, sees_BHLS: Tensor) -> Tensor:
    """Returns the output with separate softmaxes (L, S, D) per row; 0 for rows without keys."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    none = ~sees_BHLS.any(-1)[..., None]
    terms = key[:, :, None].masked_fill(~(sees_BHLS | none)[..., None], -torch.inf)
    output = torch.einsum(
        "bhld,bhlsd,bhse->bhle", query.softmax(-1), terms.log_softmax(-2).exp(), value
    )
    return output.masked_fill(none, 0.0)


def efficient_running(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal and by running sums, for keys that one shift does for."""
    grown = (key - key.amax(2, keepdim=True)).exp()
    summed = (grown[..., None] * value[..., None, :]).cumsum(2) / grown.cumsum(2)[..., None]
    return torch.einsum("bhld,bhlde->bhle", query.softmax(-1), summed)


def assert_efficient(
    plain: Callable[[Tensor, Tensor, Tensor], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    **parameters: Any,
) -> dict[str, Tensor]:
    """Checks the gradients against autograd of the plain function, and returns them.

    The bound has as many roundings as sums have terms, and |x| for each e^x that is not 0. It is
    relative to the mass, where nothing cancels.
    """
    query, key, value = (x.clone().requires_grad_() for x in tensors)
    truth = torch.autograd.grad(plain(query, key, value), (query, key, value), grad)
    ones = torch.ones_like(value[..., :1]).requires_grad_()
    (mass_BGS1,) = torch.autograd.grad(
        plain(query.detach(), key.detach(), ones).sum(), ones
    )  # of the rows of A in a key's column
    scores = 2 * float((grad.norm(dim=-1).amax() * tensors[2].norm(dim=-1).amax()).double())
    arguments = ("query_BHLD", "key_BGSD", "value_BGSE")
    given = dict(zip(arguments, tensors, strict=True))
    found = gradients("efficient", grad, given, parameters)
    masses = (
        scores * query.detach().softmax(-1), scores * mass_BGS1, grad.abs().amax() * mass_BGS1
    )  # fmt: skip
    rounded = EPS * (8 + 2 * sum(query.shape[2:] + value.shape[2:]) + 3 * 745)
    least = math.exp(300.0) * torch.finfo(torch.float64).smallest_normal * scores
    for name, true, mass in zip(("query", "key", "value"), truth, masses, strict=True):
        assert ((found[name] - true).abs() <= rounded * mass + least).all(), name
    return found


def keys_of(kind: str, key: Tensor) -> Tensor:
    """Returns keys for which one shift is enough (rises up to 300) or not."""
    position_S1 = torch.arange(key.shape[2])[:, None]
    if kind.startswith("late"):
        return key + float(kind.removeprefix("late by ")) * (position_S1 == 19)
    slopes = {"ordinary": 0.0, "rising": 1000.0, "by 3": 3.0, "falling": -1000.0, "huge": 0.0}
    return key * (1e307 if kind == "huge" else 1.0) + slopes[kind] * position_S1


@pytest.mark.slow
@each("offset", [0, "end", -7, 25, None])
@each(
    "kind",
    ["ordinary", "late by 120", "late by 290", "late by 1000", "rising", "by 3", "falling", "huge"],
)
def test_any_keys(kind: str, offset: int | str | None) -> None:
    """Covers several chunks, fewer keys than queries, grouped heads, and padding."""
    B, H, G, L, S, D, E = 3, 4, 2, 50, 40, 3, 2
    query, grad = torch.randn(B, H, L, D).double(), torch.randn(B, H, L, E).double()
    key, value = keys_of(kind, torch.randn(B, G, S, D).double()), torch.randn(B, G, S, E)
    query, value = query * (1e307 if kind == "huge" else 1.0), value.double()
    lengths_B, row_L1, at_S = torch.tensor([S, 23, 0]), torch.arange(L)[:, None], torch.arange(S)
    padding_BGS1 = (at_S >= lengths_B[:, None])[:, None, :, None]
    sees = ~padding_BGS1.mT
    parameters: dict[str, Any] = {"key_lengths_B": lengths_B, "causal": offset is not None}
    if offset is not None:
        parameters["query_offset"] = offset
        starts_B = lengths_B - L if offset == "end" else torch.full((B,), int(offset))
        sees = sees & (at_S <= row_L1 + starts_B.view(B, 1, 1, 1))
    sees = sees.expand(B, H, L, S)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.masked_fill(padding_BGS1, 0.0) for x in (key, value))
        return efficient_plainly(query, key, value, sees)

    found = assert_efficient(plain, (query, key, value), grad, **parameters)
    key.masked_fill_(padding_BGS1, torch.nan)
    value.masked_fill_(padding_BGS1, torch.inf)
    given = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    with_garbage = gradients("efficient", grad, given, parameters)
    for name, gradient in found.items():
        assert torch.equal(with_garbage[name], gradient)
    assert not found["query"][~sees.any(-1)].any()
    for name in ("key", "value"):
        assert not found[name].masked_fill(~padding_BGS1, 0.0).any()


@each("late", [0.0, 320.0])
def test_4096_keys(late: float) -> None:
    """Covers the path with one shift, and that of keys that rise by more than 300."""
    tensors = (torch.randn(1, 2, 4096, 3), torch.randn(1, 1, 4096, 3), torch.randn(1, 1, 4096, 2))
    query, key, value = (x.double() for x in tensors)
    key[:, :, 3000:, 0] += late

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return efficient_running(query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1))

    grad = torch.randn(1, 2, 4096, 2).double()
    assert_efficient(plain, (query, key, value), grad, causal=True)


@each(
    ("kind", "causal"),
    [("ordinary", False), ("by 3", False), ("ordinary", True), ("late by 1000", True)],
)
def test_adding_a_constant_to_a_key_channel_changes_nothing(kind: str, causal: bool) -> None:
    """The gradients of a channel therefore sum to 0 over the keys."""
    tensors = random_inputs("efficient", {"B": 2, "H": 4, "G": 2, "L": 33, "S": 33, "D": 3, "E": 2})
    query, value, grad = tensors["query_BHLD"], tensors["value_BGSE"], torch.randn(2, 4, 33, 2)
    key = keys_of(kind, tensors["key_BGSD"].mul(2**20).round().div(2**20))  # sums are exact
    moved = key + torch.tensor([1.0, -4096.0, 0.0])
    assert torch.equal(moved - torch.tensor([1.0, -4096.0, 0.0]), key)
    given = tensors | {"key_BGSD": key}
    found = gradients("efficient", grad.double(), given, {"causal": causal})
    again = gradients("efficient", grad.double(), given | {"key_BGSD": moved}, {"causal": causal})
    for name, gradient in found.items():
        assert torch.equal(again[name], gradient)
    K, rows, S = 2, query.shape[2], key.shape[2]
    scores = 2 * float(grad.norm(dim=-1).amax() * value.norm(dim=-1).amax())
    bound = EPS * K * rows * scores * (8 + 2 * (rows + S) + 3 * 745)
    assert found["key"].sum(2).abs().max() <= bound
    assert found["key"].abs().max() > 1e6 * bound


@each("kind", ["ordinary", "late by 290", "late by 1000"])
@each(("v", "g"), [(900, -900), (-1000, 900), (900, -1000), (1000, -20), (-1000, 0)])
def test_extreme_values_and_gradients(kind: str, v: int, g: int) -> None:
    """Powers of two in values and in the output's gradient scale the result exactly."""
    tensors = random_inputs("efficient", {"B": 1, "H": 2, "G": 2, "L": 40, "S": 40, "D": 3, "E": 2})
    given = tensors | {"key_BGSD": keys_of(kind, tensors["key_BGSD"])}
    grad = torch.randn(1, 2, 40, 2).double()
    found = gradients("efficient", grad, given, {"causal": True})
    scaled = given | {"value_BGSE": torch.ldexp(given["value_BGSE"], torch.tensor(v))}
    sized = gradients("efficient", torch.ldexp(grad, torch.tensor(g)), scaled, {"causal": True})
    for name, exponent in (("query", v + g), ("key", v + g), ("value", g)):
        expected = torch.ldexp(found[name], torch.tensor(exponent))
        normal = expected.abs() >= torch.finfo(torch.float64).smallest_normal
        assert torch.equal(sized[name][normal], expected[normal])
        assert normal.any()


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("kind", ["ordinary", "late by 1000"])
def test_narrow_dtypes_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    narrow = random_inputs("efficient", {"B": 2, "L": 40, "S": 40} | {"H": 4, "G": 2}, dtype)
    narrow["key_BGSD"] = keys_of(kind, narrow["key_BGSD"].float() * 0.5).to(dtype)
    grad = torch.randn(2, 4, 40, 2).to(dtype)
    found = gradients("efficient", grad, narrow, {"causal": True})
    wide = {name: tensor.double() for name, tensor in narrow.items()}
    for name, true in gradients("efficient", grad.double(), wide, {"causal": True}).items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], true.float())
