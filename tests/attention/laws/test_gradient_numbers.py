"""Gradients of narrow dtypes, and at the ends of the dtypes' ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

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
