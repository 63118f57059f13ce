"""Gradients of narrow dtypes, of long sequences, and at the ends of the dtypes' ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

from qkv.attention.variants import softmax
from support.each import each
from support.variant_calls import (
    EPS,
    SIZES,
    VARIANTS,
    forward_output,
    gradients,
    random_inputs,
)


def roundings(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Returns the bounds of a gradient's error in eps of float32.

    Each is the mass of the gradient's sums times their number of terms. Variants that are not named
    compute in float64.
    """
    size = {a: t.double().abs() for a, t in tensors.items()}
    if name == "linear_layer":
        x, weight = size["x_BI"], size["weight_OI"]
        grad = grad.double().abs()
        bounds = {"x": grad @ weight * len(weight), "weight": grad.mT @ x * len(x)}
    elif name == "softmax":
        query, key, value = (tensors[a].double() for a in ("query_BHLD", "key_BGSD", "value_BGSE"))
        K, S, (D, E) = query.shape[1] // key.shape[1], key.shape[2], (key.shape[3], value.shape[3])
        key, value = key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)
        share = torch.softmax(scale * query @ key.mT, -1)
        products = (query.abs() @ key.abs().mT).amax(-1, keepdim=True) * scale
        slope = grad.double().abs() @ value.abs().mT
        slope = share * (slope + (share * slope).sum(-1, keepdim=True))
        # a share has the errors of its scores and of its row's sum
        terms = 2 * (D + 2) * products + 3 * S + E + 8
        slope, share = slope * terms, share * terms
        bounds = {
            "query": scale * slope @ key.abs() * 2,
            "key": (scale * slope.mT @ query.abs() * 2).unflatten(1, (-1, K)).sum(2),
            "value": (share.mT @ grad.double().abs()).unflatten(1, (-1, K)).sum(2) * 2,
        }
    elif name == "sigmoid":
        query, key, value = (tensors[a].double() for a in ("query_BHLD", "key_BGSD", "value_BGSE"))
        K, (L, D), (S, E) = query.shape[1] // key.shape[1], query.shape[2:], value.shape[2:]
        key, value = key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)
        scores = scale * query @ key.mT - math.log(S)
        share = torch.sigmoid(scores)
        # a weight and its slope have the errors of the score; sums have S or L terms
        terms = 2 * (D + 2) * scale * query.abs() @ key.abs().mT + 2 * scores.abs() + S + L + E + 16
        slope = grad.double().abs() @ value.abs().mT * share * (1 - share) * terms
        bounds = {
            "query": scale * slope @ key.abs(),
            "key": (scale * slope.mT @ query.abs()).unflatten(1, (-1, K)).sum(2),
            "value": ((share * terms).mT @ grad.double().abs()).unflatten(1, (-1, K)).sum(2),
        }
    else:
        bounds = {}
    return bounds


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("name", [n for n, v in VARIANTS.items() if v.has_closed_form_gradients])
def test_narrow_dtypes_have_bounded_error(name: str, dtype: torch.dtype) -> None:
    sizes = SIZES | {"L": 90, "S": 100, "D": 16, "E": 8, "N": 110}
    tensors = random_inputs(name, sizes, dtype)
    grad = torch.randn_like(forward_output(name, tensors, {}))
    found = gradients(name, grad, tensors, {})
    wide = {a: t.double() for a, t in tensors.items()}
    truth = gradients(name, grad.double(), wide, {})
    bounds, eps = roundings(name, grad, tensors, 16**-0.5), torch.finfo(torch.float32).eps
    for n, gradient in found.items():
        bound = eps * (truth[n].abs() + bounds.get(n, torch.zeros(())))
        assert ((gradient.double() - truth[n]).abs() <= bound).all()


def plain(
    name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> Tensor:
    """Returns the textbook output in differentiable torch, for equally many heads."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    if name == "softmax":
        scores = (scale * query @ key.mT).masked_fill(~visible, -torch.inf)
        return torch.softmax(scores, -1) @ value
    if name == "sigmoid":
        return torch.sigmoid(scale * query @ key.mT - math.log(len(visible))) * visible @ value
    if name == "linear":
        a = (elu(query) + 1) @ (elu(key) + 1).mT
    else:
        a = 1 + normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    a = a * visible
    return a / a.sum(-1, keepdim=True) @ value


@each("causal", [False, True])
@pytest.mark.parametrize("length", [65, 1000, pytest.param(2100, marks=pytest.mark.slow)])
@each("name", ["sigmoid", "softmax", "linear", "taylor"])
def test_lengths_above_one_block(name: str, length: int, causal: bool) -> None:
    query, key, value, grad = (torch.randn(1, 1, length, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = plain(name, leaves[0], leaves[1], leaves[2], causal, 8**-0.5)
    slopes = torch.autograd.grad(output, leaves, grad)
    tensors = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    found = gradients(name, grad, tensors, {"causal": causal})
    for n, slope in zip(("query", "key", "value"), slopes, strict=True):
        # every entry is a sum of at most that many terms of about 1, computed in two ways;
        # taylor's errors grow by the cancellation of the row's sum, at most by 1e3
        close = 4 * length * EPS * (1e3 if name == "taylor" else 1)
        torch.testing.assert_close(found[n], slope, rtol=close, atol=close)


def test_item_of_a_batch_has_the_gradients_that_it_has_alone() -> None:
    """The order of summation does not depend on the batch."""
    for length in (16, 64, 128, 256):
        grad, *tensors = torch.randn(4, 4, 2, length, 8)
        together = softmax.backward(softmax.Call(*tensors, causal=True), grad)
        for b in range(4):
            alone = softmax.backward(
                softmax.Call(*(x[b : b + 1] for x in tensors), causal=True), grad[b : b + 1]
            )
            for n, gradient in alone.items():
                assert torch.equal(gradient[0], together[n][b]), (length, b, n)


@each(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e37), (torch.float64, 1e20), (torch.float64, 1e300)],
)
def test_huge_queries_and_values_have_finite_gradients(dtype: torch.dtype, size: float) -> None:
    """Powers of two in and out change no bit of the gradient, and nothing is NaN."""
    for name in ("sigmoid", "softmax", "linear", "taylor"):
        tensors = random_inputs(name, dtype=dtype)
        tensors["query_BHLD"] *= size
        tensors["query_BHLD"][:, :, 0] = 0.0
        for factor in (1.0, size):
            grad = torch.randn_like(forward_output(name, tensors, {})) * factor
            found = gradients(name, grad, tensors, {"causal": True})
            if (
                name in ("linear", "taylor") or factor == 1.0
            ):  # the slopes times such queries are infinite
                assert all(gradient.isfinite().all() for gradient in found.values()), name
            assert not any(gradient.isnan().any() for gradient in found.values()), name
    tensors = random_inputs("softmax")
    tensors["value_BGSE"] *= 2.0**1000
    grad = torch.randn(3, 4, 3, 2, dtype=torch.float64)
    small = tensors | {"value_BGSE": tensors["value_BGSE"] * 2.0**-1000}
    found = gradients("softmax", grad * 2.0**-1000, tensors, {"scale": -0.3})
    truth = gradients("softmax", grad, small, {"scale": -0.3})
    for n, power in (("query", 0), ("key", 0), ("value", -1000)):
        torch.testing.assert_close(found[n], truth[n] * 2.0**power, rtol=64 * EPS, atol=0)


@each("causal", [False, True])
@each("size", [-40.0, -60.0, -300.0, -1e4])
def test_linear_with_vanishing_features(size: float, causal: bool) -> None:
    """For x <= 0, phi is exp, and a constant added to queries or keys changes no gradient."""
    near = random_inputs("linear", dtype=torch.float32)
    for argument in ("query_BHLD", "key_BGSD"):  # in steps that float32 represents at any size
        near[argument] = near[argument].mul(4).round().div(4) - 4
    far = near | {a: near[a] + size for a in ("query_BHLD", "key_BGSD")}
    grad = torch.randn(3, 4, 3, 2)
    found = gradients("linear", grad, far, {"causal": causal})
    truth = gradients("linear", grad, near, {"causal": causal})
    for n, gradient in found.items():
        close = torch.finfo(torch.float32).eps
        torch.testing.assert_close(gradient, truth[n], rtol=4 * close, atol=1e3 * EPS)


def test_linear_with_row_sums_that_underflow() -> None:
    """A late key of another size does not change the gradients of early rows."""
    tensors = random_inputs("linear", SIZES | {"B": 1, "L": 6, "S": 6})
    tensors["key_BGSD"] = -900 - tensors["key_BGSD"].abs()
    tensors["query_BHLD"] = -tensors["query_BHLD"].abs()
    early = {a: t[:, :, :4].clone() for a, t in tensors.items()}
    tensors["key_BGSD"][:, :, 4:] = 50.0
    grad = torch.randn(1, 4, 6, 2, dtype=torch.float64)
    grad[:, :, 4:] = 0.0
    found = gradients("linear", grad, tensors, {"causal": True})
    truth = gradients("linear", grad[:, :, :4], early, {"causal": True})
    for n, gradient in found.items():
        torch.testing.assert_close(gradient[:, :, :4], truth[n], rtol=1e3 * EPS, atol=1e2 * EPS)
        assert not gradient[:, :, 4:].any()


@each("dtype", [torch.float64, torch.float32])
@each("angle", [1e-1, 1e-3, 1e-5])
def test_taylor_with_opposed_keys(dtype: torch.dtype, angle: float) -> None:
    """Compares with central differences of 80 digits, for the rounded inputs."""
    turns = torch.tensor([1.0, -1.5, 0.5], dtype=torch.float64) * angle
    key = -torch.stack([turns.cos(), turns.sin()], -1) * torch.tensor([[1.0], [3.0], [0.25]])
    query, value = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [-2.0], [4.0]])
    rows = [x.to(dtype) for x in (query, key, value)]
    tensors = dict(
        zip(("query_BHLD", "key_BGSD", "value_BGSE"), (x[None, None] for x in rows), strict=True)
    )
    found = gradients("taylor", torch.ones(1, 1, 1, 1, dtype=dtype), tensors, {})
    numbers = [Decimal(x) for row in rows for x in row.flatten().tolist()]

    def output(x: list[Decimal]) -> Decimal:
        similar = []
        for k in range(3):
            a, b = x[2 + 2 * k], x[3 + 2 * k]
            norms = ((x[0] ** 2 + x[1] ** 2) * (a**2 + b**2)).sqrt()
            similar.append(1 + (x[0] * a + x[1] * b) / norms)
        return sum((s * v for s, v in zip(similar, x[8:], strict=True)), Decimal()) / sum(similar)

    with localcontext(prec=80):
        step, slopes = Decimal("1e-25"), []
        for n in range(len(numbers)):
            up, down = ([*numbers[:n], numbers[n] + d, *numbers[n + 1 :]] for d in (step, -step))
            slopes.append(float((output(up) - output(down)) / (2 * step)))
    result = torch.cat([found[n].double().flatten() for n in ("query", "key", "value")])
    truth = torch.tensor(slopes, dtype=torch.float64)
    # roundings of a direction over the least angle, and of sums of terms as large as the largest
    close = 2 * (8 + 4) * EPS / (angle / 2) + 4 * torch.finfo(dtype).eps
    for part in (slice(0, 2), slice(2, 8), slice(8, 11)):
        assert ((result - truth).abs()[part] <= 4 * close * truth[part].abs().max()).all()
