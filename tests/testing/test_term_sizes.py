"""Tests of `TermSizes`: terms that cancel keep their size, through views and in place."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.testing.term_sizes import TermSizes


def test_terms_that_cancel_keep_their_size() -> None:
    x = torch.tensor([[3.0, -3.0], [5.0, 1.0]], dtype=torch.float64)
    with TermSizes(0.0) as sizes:
        total = x.sum(1)
        product = x @ torch.ones(2, 1, dtype=torch.float64)
        rest = 1 - x.sigmoid()
        share = total / 2 - total / 2
        buffer = torch.zeros(2, 2, dtype=torch.float64)
        buffer[:, 0] = total
        buffer[:, 1].sub_(total).add_(total)
    assert total.tolist() == [0, 6]
    assert sizes.of(total).tolist() == [6, 6]
    assert sizes.of(product).flatten().tolist() == [6, 6]
    assert sizes.of(rest).tolist() == [[2, 2], [2, 2]]
    assert sizes.of(share).tolist() == [6, 6]
    assert sizes.of(buffer.mT[0]).tolist() == [6, 6]
    assert sizes.of(buffer[:, 1]).tolist() == [12, 12]


def test_numbers_keep_their_bits_and_are_at_most_as_large_as_their_terms() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        y = x.softmax(-1) @ x.mT - x.mean()
        return [y, y.cumsum(0), (y / y.norm()).flip(0), torch.cat([y, y.exp()]).mul_(-2)]

    x = torch.randn(6, 6, dtype=torch.float64)
    with TermSizes(0.0) as sizes:
        found = compute(x)
    for plain, result in zip(compute(x), found, strict=True):
        assert torch.equal(plain, result)
        assert bool((sizes.of(result) >= result.abs() * (1 - 1e-12)).all())
