"""Sigmoid attention by example, at extremes, and its gradients against autograd."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv.attention.variants import sigmoid
from support.agreement import assert_agrees
from support.dtypes import DTYPES
from support.each import each

ALL: Final = frozenset({"output", "weights", "scores"})


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float64, L: int = 5, S: int = 7) -> list[Tensor]:
    """Returns queries of 4 heads, and keys and values of 2."""
    shapes = ((2, 4, L, 6), (2, 2, S, 6), (2, 2, S, 3))
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def attend(*tensors: Tensor, outputs: frozenset[str] = ALL, **arguments: Any) -> Any:
    """Calls `attend`; tensors of any dtype but float64 leave the float32 path only if unsafe."""
    return sigmoid.attend(sigmoid.Call(*tensors, **arguments), outputs)


def test_example_by_hand() -> None:
    """Scores 0 and log 3 with bias -log 2: the weights are 1/3 and 3/5."""
    query = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[0.0], [math.log(3)]]]], dtype=torch.float64)
    value = torch.tensor([[[[3.0], [10.0]]]], dtype=torch.float64)
    found = attend(query, key, value)
    torch.testing.assert_close(found.weights.flatten().tolist(), [1 / 3, 3 / 5])
    assert found.output.item() == pytest.approx(7.0)


@each("dtype", DTYPES)
@each("mask", [None, 1e30, -1e30])
def test_huge_scores_give_weights_of_0_and_1(dtype: torch.dtype, mask: float | None) -> None:
    """Queries and keys at the end of the range; key 2 is orthogonal, and has the bias alone."""
    most = torch.finfo(dtype).max
    query = torch.tensor([[[[most, 0.0]]]], dtype=dtype)
    key = torch.tensor([[[[most, 1.0], [-most, 1.0], [0.0, most]]]], dtype=dtype)
    value = torch.tensor([[[[1.0], [2.0], [4.0]]]], dtype=dtype)
    added = None if mask is None else torch.full((1, 1, 1, 1), mask)
    for bias in (None, 1e9, -1e9):
        found = attend(query, key, value, mask_BHLS=added, bias=bias)
        middle = (-math.log(3) if bias is None else bias) + (mask or 0.0)
        expected = [1.0, 0.0, float(torch.tensor(middle).double().sigmoid())]
        if dtype == torch.float16 and (mask is not None or bias is not None):
            expected[:2] = torch.sigmoid(
                torch.tensor([1.0, -1.0]) * most**2 / math.sqrt(2) + middle
            ).tolist()
        torch.testing.assert_close(found.weights.flatten().tolist(), expected, rtol=1e-6, atol=0)


@each("dtype", DTYPES)
def test_sums_of_the_largest_values(dtype: torch.dtype) -> None:
    """Partial sums overflow, and the whole sum does not."""
    most = torch.finfo(dtype).max
    value = torch.tensor([most, most, -most, -most, 1.0], dtype=dtype).view(1, 1, 5, 1)
    query, key = torch.zeros(1, 1, 1, 1, dtype=dtype), torch.zeros(1, 1, 5, 1, dtype=dtype)
    found = attend(query, key, value, bias=1e3)
    assert found.output.isfinite().all()
    assert found.output.abs() <= 2
    over = attend(query[..., :1, :], key[:, :, :2], value[:, :, :2], bias=1e3)
    assert over.output.item() == math.inf  # the true sum is beyond the dtype


@each("dtype", DTYPES)
@each("size", [1.0, "tiny", "huge"])
def test_families_of_numbers(dtype: torch.dtype, size: Any) -> None:
    info = torch.finfo(dtype)
    factor = {"tiny": info.tiny * 4, "huge": 1e120 if dtype == torch.float64 else 1e3}.get(size, 1)
    query, key, value = (x * factor for x in inputs())
    assert_agrees("sigmoid", *(x.to(dtype) for x in (query, key, value)))


def test_gradients_of_saturated_weights_keep_their_digits() -> None:
    """1 - A is 2e-9 in the row, and 0 by subtraction in float32."""
    one = torch.ones(1, 1, 1, 1)
    found = sigmoid.backward(sigmoid.Call(one, one, one, bias=19.0, scale=1.0), one)
    slope = 1 / (2 + math.exp(20.0) + math.exp(-20.0))
    for name in ("query", "key"):
        assert found[name].item() == pytest.approx(slope, rel=1e-5)
