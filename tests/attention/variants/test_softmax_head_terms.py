"""Softmax with the slopes of ALiBi and with sinks, against the reference and by examples."""

from __future__ import annotations

import math
from typing import Any

import torch

from qkv.attention.variants import softmax
from support.checked_softmax import ALL, OUTPUT, attend, weights
from support.dtypes import DTYPES, exact_dtype
from support.each import each
from support.head_terms import alibi
from support.references import reference_of
from support.tolerances import assert_within, bounds


def inputs_of(dtype: torch.dtype, H: int = 4, G: int = 2, L: int = 6, S: int = 9) -> list[Any]:
    """Returns normal queries, keys and values of two items."""
    query = torch.randn(2, H, L, 5).to(dtype)
    return [query, torch.randn(2, G, S, 5).to(dtype), torch.randn(2, G, S, 3).to(dtype)]


def test_slopes_by_example() -> None:
    """All products are zero, so the scores are slope * (j - i - query_offset)."""
    query, key = torch.zeros(1, 2, 2, 1), torch.zeros(1, 2, 3, 1)
    slopes = torch.tensor([1.0, 0.5])
    found = attend(query, key, key, alibi_slopes_H=slopes, query_offset=1, outputs=ALL)
    expected = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0]])
    assert found.scores is not None
    assert torch.equal(found.scores, torch.stack([expected, expected / 2])[None])
    lengths = torch.tensor([2])
    found = attend(
        query, key, key, None, lengths, slopes, query_offset="end", causal=True, outputs=ALL
    )
    expected = torch.tensor([[0.0, -torch.inf, -torch.inf], [-1.0, 0.0, -torch.inf]])
    assert found.scores is not None
    assert torch.equal(found.scores, torch.stack([expected, expected / 2])[None])


def test_sinks_by_example() -> None:
    """The scores are 0, so a weight is 1 over the number of keys and the sink's exponential."""
    query, key = torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 3, 1)
    value, sinks = torch.tensor([[[[2.0], [4.0], [6.0]]]]), torch.tensor([0.0, math.log(5.0)])
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, sinks_H=sinks, outputs=outputs)
        assert_within(found.output, torch.tensor([3.0, 1.5]).double().view(1, 2, 1, 1), 2**-21)
        if found.weights is not None:
            expected = torch.tensor([1 / 4, 1 / 8]).double().view(1, 2, 1, 1).expand(1, 2, 1, 3)
            assert_within(found.weights, expected, 2**-24)


@each("dtype", DTYPES)
def test_fused_kernel_runs_with_slopes_and_sinks(dtype: torch.dtype) -> None:
    query, key, value = inputs_of(dtype, L=70, S=90)
    terms: dict[str, Any] = {
        "alibi_slopes_H": torch.randn(4).to(dtype),
        "sinks_H": torch.randn(4).to(dtype),
    }
    for n, given_terms in enumerate((terms, *({n: t} for n, t in terms.items()))):
        found = attend(query, key, value, **given_terms, causal=n > 0, query_offset="end")
        assert found.backend == "sdpa"


@each("dtype", DTYPES[1:])
def test_wide_slopes_with_narrow_queries(dtype: torch.dtype) -> None:
    """At a distance of 1,000, slopes rounded to bfloat16 would be off by 2 in the exponent."""
    query, key, value = inputs_of(dtype, L=2, S=1000)
    slopes = torch.tensor([2**-0.5, 2**-1.5, 1e-3, 3.3e-3], dtype=torch.float32)
    parameters: dict[str, Any] = {"query_offset": "end", "causal": True}
    truth = reference_of(softmax.Call(query, key, value, None, None, slopes, **parameters))
    added = alibi(slopes, 2, 1000, "end")
    bound = bounds(query, key, value, None, parameters, truth, added)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, None, None, slopes, **parameters, outputs=outputs)
        assert_within(found.output, truth.output, bound.output)


@each("offset", [10**4, 10**6, 2**31 - 1, -(10**6)])
@each("dtype", DTYPES[:3])
def test_positions_far_from_all_keys(dtype: torch.dtype, offset: int) -> None:
    """float32 cannot represent the differences of such distances, but they decide the weights."""
    query, key, value = inputs_of(dtype)
    slopes = torch.tensor([0.5, -0.3, 0.7, 2**-8])
    near = reference_of(softmax.Call(query, key, value, None, None, slopes))
    assert near.weights is not None
    close = 2e3 * torch.finfo(exact_dtype(dtype)).eps + 2.0**-52 * abs(offset)
    found = attend(query, key, value, None, None, slopes, query_offset=offset, outputs=ALL)
    assert_within(found.weights, near.weights, close)
    found = attend(query, key, value, None, None, slopes, query_offset=offset)
    assert_within(found.output, near.output, 4 * (close + 9 * torch.finfo(dtype).eps))
    block = weights(query, key, None, None, slopes, query_offset=offset)(slice(1, 4))
    assert_within(block, near.weights[:, :, 1:4], close)


@each("dtype", DTYPES)
@each("L", [6, 70])  # with 70 queries torch's kernel runs if it can
@each(
    "parameters",
    [{}, {"window": (2, 1), "query_offset": 2}, {"dropout": 0.4, "seed": 2**40, "causal": True}],
)
def test_infinite_sinks_leave_all_or_nothing(
    dtype: torch.dtype, L: int, parameters: dict[str, Any]
) -> None:
    """Beside a sink of inf all weights are 0, and one of -inf is no sink, for every result."""
    query, key, value = inputs_of(dtype, L=L)
    infinite = torch.tensor([math.inf, 0.5, -math.inf, math.inf])
    allowed = torch.rand(1, 4, L, 9) > 0.3
    allowed[:, :, 2] = False
    added = torch.randn(1, 4, L, 9).masked_fill(~allowed, -math.inf)
    for mask, lengths in ((allowed, None), (added, torch.tensor([9, 4]))):
        named: dict[str, Any] = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
        named |= {"mask_BHLS": mask, "key_lengths_B": lengths, **parameters}
        finite = reference_of(softmax.Call(**named, sinks_H=torch.full((4,), 0.5)))
        plain = reference_of(softmax.Call(**named))
        bound = bounds(query, key, value, mask, parameters, plain)
        truth = reference_of(softmax.Call(**named, sinks_H=infinite))
        assert truth.weights is not None
        for name in ("output", "weights"):
            exact, expected, other = (getattr(x, name) for x in (truth, finite, plain))
            assert isinstance(exact, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert isinstance(other, torch.Tensor)
            assert not exact[:, [0, 3]].any()
            assert torch.equal(exact[:, 1], expected[:, 1])
            assert torch.equal(exact[:, 2], other[:, 2])
        for outputs in (OUTPUT, ALL):
            found = attend(**named, sinks_H=infinite, outputs=outputs)
            assert_within(found.output, truth.output, bound.output)
            assert found.output is not None
            assert not found.output[:, [0, 3]].any()
            if found.weights is not None:
                assert_within(found.weights, truth.weights, bound.weights)
                assert not found.weights[:, [0, 3]].any()
        rows = weights(query, key, mask, lengths, None, infinite, **parameters)(slice(1, 4))
        assert_within(rows, truth.weights[:, :, 1:4], bound.weights[:, :, 1:4])
        for name, x in named.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                named[name] = x.double()
        planes = torch.arange(8).view(2, 4)
        found_steps = softmax.steps(
            softmax.Call(**named, sinks_H=infinite.double(), plane_BH=planes)
        )
        steps = {n: x() if callable(x) else x for n, x in found_steps.items()}
        assert_within(steps["output"], truth.output, 1e-12)
        assert not any(x.isnan().any() for x in steps.values())
        assert torch.equal(steps["row_sums"][:, 0], torch.ones(2, L).double())
