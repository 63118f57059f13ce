"""Linformer against its reference, with given and random projections, and extreme numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.attention.variants import linformer
from support.dtypes import DTYPES, exact_dtype
from support.each import each
from support.linformer_reference import (
    ALL,
    OUTPUT,
    attend_checked,
    random_projection,
)
from support.references import reference_of


@each("dtype", DTYPES)
def test_shorter_sequence_takes_the_first_columns(dtype: torch.dtype) -> None:
    """Given or random projections have the same bits as projections for the shorter length."""
    query, key, value = (torch.randn(2, 2, 20, 8).to(dtype) for _ in range(3))
    E, F = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    longer = attend_checked(query, key, value, E, F)
    by_hand = attend_checked(query, key, value, E[:, :20].contiguous(), F[:, :20].contiguous())
    for name in ALL:
        assert torch.equal(getattr(longer, name), getattr(by_hand, name))
    drawn = attend_checked(query, key, value, rank=5, seed=3)
    longer = attend_checked(
        query, key, value, *(random_projection(i, 5, 64, 3).to(dtype) for i in (0, 1))
    )
    for name in ALL:
        assert torch.equal(getattr(drawn, name), getattr(longer, name))


@each("dtype", DTYPES)
def test_random_projection_equals_given_projection(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 2, 20, 8).to(dtype) for _ in range(3))
    for seed in (0, 7, 2**64 - 1):
        E, F = (random_projection(stream, 6, 20, seed).to(dtype) for stream in (0, 1))
        expected = attend_checked(query, key, value, E, F)
        for given_projections in ((None, None), (E, None), (None, F)):
            found = attend_checked(query, key, value, *given_projections, rank=6, seed=seed)
            for name in ALL:
                assert torch.equal(getattr(found, name), getattr(expected, name))
        assert not torch.equal(E, F)
    one, two = (attend_checked(query, key, value, rank=6, seed=seed).map for seed in (1, 2))
    assert one is not None
    assert two is not None
    assert not torch.equal(one, two)


@each("rank", [1, 64, 256])
def test_random_projection_has_variance_1_over_rank(rank: int) -> None:
    """Mean and variance within five standard deviations; E, F and other seeds uncorrelated."""
    n = rank * 2000
    parts = [
        random_projection(stream, rank, 2000, seed)
        for stream, seed in ((0, 0), (1, 0), (0, 1), (0, 2**63))
    ]
    for part in parts:
        unit = part.flatten() * math.sqrt(rank)
        assert abs(float(unit.mean())) < 5 / math.sqrt(n)
        assert abs(float((unit**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    correlated = torch.corrcoef(torch.stack([p.flatten() for p in parts])) - torch.eye(4)
    assert (correlated.abs() < 5 / math.sqrt(n)).all()


# ---------------------------------------------------------------- the extremes


@each("dtype", [torch.float64, torch.float32])
def test_numbers_whose_products_overflow(dtype: torch.dtype) -> None:
    """Powers of two cancel: E K, F V and Q (E K)^T overflow, but the output does not."""
    query, key, value = (torch.randn(2, 2, 9, 4).to(dtype) for _ in range(3))
    E, F = torch.randn(5, 9).to(dtype), torch.randn(5, 9).to(dtype)
    e = 900 if dtype == torch.float64 else 110
    eps = torch.finfo(dtype).eps
    plain = attend_checked(query, key, value, E, F, scale=0.5)
    for factors in ((-e, e, e, -e), (e, -e, e, -e), (e, e, -e, -e), (e, e, e, -2 * e - e)):
        a, b, c, d = (2.0**f if abs(f) < 1000 else 0.0 for f in factors)
        if not d:
            continue
        found = attend_checked(query * a, key * b, value * 2.0 ** (e // 2), E * c, F, scale=0.5 * d)
        for name, scaled in (("map", 1.0), ("weights", 1.0), ("output", 2.0 ** (e // 2))):
            close = 500 * eps  # about 50 roundings of scores and sums of a size of 10
            expected = getattr(plain, name) * scaled
            assert getattr(found, name).isfinite().all()
            off = (getattr(found, name) - expected).abs().amax() / scaled
            assert off <= close * max(1.0, float(expected.abs().amax() / scaled)), name


def test_mixtures_that_overflow_and_cancel() -> None:
    """F V of 1e310 and its negative average to 0; a weight of e^-100 makes 1e310 finite again."""
    key = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1e110], [1.0]]]], dtype=torch.float64)
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    F = torch.tensor([[1e200, 0.0], [-1e200, 0.0]], dtype=torch.float64)
    E = torch.zeros(2, 2, dtype=torch.float64)
    for outputs in (ALL, OUTPUT):
        found = linformer.attend(linformer.Call(query, key, value, E, F), outputs)
        assert found.output is not None
        assert float(found.output) == 0.0
        far = torch.tensor([[0.0, 0.0], [-100.0, 0.0]], dtype=torch.float64)
        one = torch.tensor([[0.0, 1.0], [1e200, 0.0]], dtype=torch.float64)
        found = linformer.attend(linformer.Call(query, key, value, far, one), outputs)
        assert found.output is not None
        expected = math.exp(-100.0) * 1e300 * 1e10
        assert float(found.output) == pytest.approx(expected, rel=1e-13)
        small_E = torch.tensor([[0.0, 0.0], [-1e5, 0.0]], dtype=torch.float64)
        found = linformer.attend(linformer.Call(query, key, value, small_E, one), outputs)
        assert found.output is not None
        assert float(found.output) == 1.0


@each("dtype", DTYPES)
def test_largest_numbers_everywhere(dtype: torch.dtype) -> None:
    """The map is one-hot or even: scores are powers of two, so equal scores stay equal."""
    most = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)

    def signs(*shape: int) -> Tensor:
        return (torch.randint(0, 2, shape) * 2.0 - 1.0).to(dtype) * most

    E, F = signs(3, 7), signs(3, 7)
    for factor in (1.0, 2.0**-9):
        query, key, value = signs(1, 2, 5, 4), signs(1, 2, 7, 4), signs(1, 2, 7, 2)
        found = attend_checked(query, key, value * 0, E * factor, F)
        assert found.output is not None
        assert found.weights is not None
        assert found.map is not None
        assert not found.output.any()
        assert found.map.isfinite().all()
        assert (found.weights.abs() <= most).all()
        rows = found.map.sum(-1).double()
        eps = torch.finfo(exact_dtype(dtype)).eps
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=4 * eps)
        truth = np.einsum(
            "bhld,rs,bhsd->bhlr", *(x.double().sign().numpy() for x in (query, E, key))
        )
        best = torch.from_numpy(truth == truth.max(-1, keepdims=True)).double()
        expected = best / best.sum(-1, keepdim=True)
        torch.testing.assert_close(found.map.double(), expected, rtol=0, atol=4 * eps)


@each("dtype", DTYPES)
def test_scores_of_huge_size(dtype: torch.dtype) -> None:
    """Products are huge but ordinary: rows are finite, and the largest score gets all weight."""
    query, key, value = (torch.randn(1, 2, 6, 4).to(dtype) * 200 for _ in range(3))
    for scale in (1e9, -1e9, 1e-30, 0.0):
        found = attend_checked(query, key, value, rank=3, scale=scale)
        truth = reference_of(linformer.Call(query, key, value, rank=3, scale=scale))
        assert truth.map is not None
        torch.testing.assert_close(found.map.double(), truth.map, rtol=0, atol=1e-5)  # type: ignore[union-attr]
