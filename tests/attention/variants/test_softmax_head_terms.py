"""Softmax with the slopes of ALiBi and with sinks, against the reference and by examples."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention.common import explicit_outputs, fused_kernel
from qkv.attention.variants import softmax
from support.checked_softmax import ALL, OUTPUT, attend, weights
from support.dtypes import DTYPES, every_dtype, exact_dtype
from support.examples import examples
from support.head_terms import alibi, head_terms
from support.softmax_requests import Request, requests
from support.tolerances import assert_within, bounds

FAMILIES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"causal": True},
    {"causal": True, "query_offset": "end"},
    {"causal": True, "query_offset": "end", "window": (3, None)},
    {"window": (2, 1), "query_offset": 2},
    {"softcap": 1.5},
    {"scale": -0.7},
    {"scale": 0.0, "causal": True},
    {"dropout": 0.4, "seed": 2**40, "causal": True},
)


def inputs_of(dtype: torch.dtype, H: int = 4, G: int = 2, L: int = 6, S: int = 9) -> list[Any]:
    """Returns normal queries, keys and values of two items."""
    query = torch.randn(2, H, L, 5).to(dtype)
    return [query, torch.randn(2, G, S, 5).to(dtype), torch.randn(2, G, S, 3).to(dtype)]


@examples(400)
@given(requests(), st.none() | st.integers(1, 300), st.data())
def test_agrees_with_reference(request: Request, block: int | None, data: st.DataObject) -> None:
    """Covers every parameter, with and without weights, whole or in blocks of `block` elements."""
    terms = data.draw(head_terms(request.G * request.K))
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(fused_kernel, "BIAS_ELEMENTS", block)
            patch.setattr(explicit_outputs, "_SCORE_ELEMENTS", block)
        assert_agrees_with_reference(request, terms)


def assert_agrees_with_reference(request: Request, terms: dict[str, Any]) -> None:
    """Checks numbers, dtypes, zeros, sums and row blocks against the reference."""
    query, key, value, mask, lengths = tensors = request.tensors()
    truth = softmax.reference(*tensors, **(terms | dict(request.parameters)))
    assert truth.weights is not None
    assert truth.scores is not None
    slopes, sinks = terms.get("alibi_slopes_H"), terms.get("sinks_H")
    added = None
    if slopes is not None:
        offset = request.parameters.get("query_offset", 0)
        added = alibi(slopes, request.L, request.S, offset, lengths)
    bound = bounds(query, key, value, mask, request.parameters, truth, added, sinks)
    exact = exact_dtype(request.dtype)
    blind = truth.scores.amax(-1) == -math.inf
    for outputs in (OUTPUT, frozenset({"weights"}), frozenset({"scores"}), ALL):
        found = attend(*tensors, **terms, **request.parameters, outputs=outputs)
        for name, dtype in (("output", request.dtype), ("weights", exact), ("scores", exact)):
            tensor = getattr(found, name)
            assert (tensor is not None) == (name in outputs)
            if tensor is None:
                continue
            assert tensor.dtype == dtype
            assert_within(tensor, getattr(truth, name), getattr(bound, name))
            if name != "scores":
                assert not tensor[blind].any()
        if found.weights is not None and not request.parameters.get("dropout"):
            assert (found.weights.sum(-1) <= 1 + (request.S + 2) * torch.finfo(exact).eps).all()
    start = request.seed % request.L
    rows = slice(start, start + 1 + request.seed % (request.L - start))
    part = weights(query, key, mask, lengths, **terms, **request.parameters)(rows)
    assert part.dtype == exact
    assert_within(part, truth.weights[:, :, rows], bound.weights[:, :, rows])


@every_dtype
@pytest.mark.parametrize("parameters", FAMILIES, ids=str)
@pytest.mark.parametrize(
    "names", [("alibi_slopes_H",), ("sinks_H",), ("alibi_slopes_H", "sinks_H")]
)
def test_every_family(dtype: torch.dtype, parameters: dict[str, Any], names: Any) -> None:
    """Each family runs with lengths, and with masks of either kind."""
    lengths = (9, 4)
    for mask in (None, torch.bool, torch.float32):
        for key_lengths in (None, lengths):
            request = Request(
                dtype, B=2, G=2, K=2, L=6, S=9, D=5, E=3, spread=1.0,
                mask=None if mask is None else (mask, (False, True, True, True), 0.3),
                key_lengths=key_lengths, garbage=math.nan, seed=3, parameters=parameters,
            )  # fmt: skip
            terms = {n: torch.randn(4, dtype=torch.float64).to(dtype) for n in names}
            assert_agrees_with_reference(request, terms)


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


@every_dtype
@pytest.mark.parametrize("parameters", FAMILIES[:5], ids=str)
def test_sink_is_a_key_without_a_value(dtype: torch.dtype, parameters: dict[str, Any]) -> None:
    """A key before the others, of zeros and with a value of zeros, whose score the mask adds."""
    query, key, value = inputs_of(dtype)
    L, S = 6, 9
    sinks = torch.randn(4).to(dtype)
    shown = softmax.reference(query, key, value, **parameters).scores
    assert shown is not None
    mask = torch.zeros(2, 4, L, S + 1, dtype=torch.float64).masked_fill_(
        torch.cat([torch.zeros(2, 4, L, 1), shown], -1) == -torch.inf, -torch.inf
    )
    mask[..., 0] = sinks.double()[:, None]
    zero = torch.zeros_like(key[:, :, :1])
    nothing = torch.zeros_like(value[:, :, :1])
    wider = torch.cat([zero, key], 2), torch.cat([nothing, value], 2)
    scale = parameters.get("scale")
    truth = softmax.reference(query, *wider, mask, scale=scale)
    bound = bounds(query, *wider, mask, parameters, truth)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, sinks_H=sinks, **parameters, outputs=outputs)
        assert_within(found.output, truth.output, bound.output)
        if found.weights is not None:
            assert truth.weights is not None
            assert_within(found.weights, truth.weights[..., 1:], bound.weights[..., 1:])


@every_dtype
def test_rows_without_keys_are_zero(dtype: torch.dtype) -> None:
    """A sink is always visible, but it has no value."""
    query, key, value = inputs_of(dtype)
    lengths = torch.tensor([0, 9])
    hidden = torch.zeros(1, 1, 6, 9, dtype=torch.bool)
    for terms in ({"sinks_H": torch.randn(4)}, {"alibi_slopes_H": torch.randn(4)}):
        for outputs in (OUTPUT, ALL):
            for found in (
                attend(query[:1], key[:1], value[:1], hidden, **terms, outputs=outputs),
                attend(query, key, value, None, lengths, **terms, outputs=outputs),
                attend(query, key, value, **terms, causal=True, query_offset=-6, outputs=outputs),
            ):
                assert found.output is not None
                assert not found.output[0].any()
                assert found.weights is None or not found.weights[0].any()


@every_dtype
def test_fused_kernel_runs_with_slopes_and_sinks(dtype: torch.dtype) -> None:
    query, key, value = inputs_of(dtype, L=70, S=90)
    terms: dict[str, Any] = {
        "alibi_slopes_H": torch.randn(4).to(dtype),
        "sinks_H": torch.randn(4).to(dtype),
    }
    for n, given_terms in enumerate((terms, *({n: t} for n, t in terms.items()))):
        found = attend(query, key, value, **given_terms, causal=n > 0, query_offset="end")
        assert found.backend == "sdpa"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_wide_slopes_with_narrow_queries(dtype: torch.dtype) -> None:
    """At a distance of 1,000, slopes rounded to bfloat16 would be off by 2 in the exponent."""
    query, key, value = inputs_of(dtype, L=2, S=1000)
    slopes = torch.tensor([2**-0.5, 2**-1.5, 1e-3, 3.3e-3], dtype=torch.float32)
    parameters: dict[str, Any] = {"query_offset": "end", "causal": True}
    truth = softmax.reference(query, key, value, None, None, slopes, **parameters)
    added = alibi(slopes, 2, 1000, "end")
    bound = bounds(query, key, value, None, parameters, truth, added)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, None, None, slopes, **parameters, outputs=outputs)
        assert_within(found.output, truth.output, bound.output)


@pytest.mark.parametrize("offset", [10**4, 10**6, 2**31 - 1, -(10**6)])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_positions_far_from_all_keys(dtype: torch.dtype, offset: int) -> None:
    """float32 cannot represent the differences of such distances, but they decide the weights."""
    query, key, value = inputs_of(dtype)
    slopes = torch.tensor([0.5, -0.3, 0.7, 2**-8])
    near = softmax.reference(query, key, value, None, None, slopes)
    assert near.weights is not None
    close = 2e3 * torch.finfo(exact_dtype(dtype)).eps + 2.0**-52 * abs(offset)
    found = attend(query, key, value, None, None, slopes, query_offset=offset, outputs=ALL)
    assert_within(found.weights, near.weights, close)
    found = attend(query, key, value, None, None, slopes, query_offset=offset)
    assert_within(found.output, near.output, 4 * (close + 9 * torch.finfo(dtype).eps))
    block = weights(query, key, None, None, slopes, query_offset=offset)(slice(1, 4))
    assert_within(block, near.weights[:, :, 1:4], close)


@every_dtype
def test_halves_have_their_own_heads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of all heads larger than a block is cut: items, key heads, query heads."""
    query, key, value = inputs_of(dtype)
    terms: dict[str, Any] = {
        "alibi_slopes_H": torch.randn(4).to(dtype),
        "sinks_H": torch.randn(4).to(dtype),
    }
    monkeypatch.setattr(fused_kernel, "BIAS_ELEMENTS", 10)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, **terms, dropout=0.2, seed=1, outputs=outputs)
        truth = softmax.reference(query, key, value, **terms, dropout=0.2, seed=1)
        added = alibi(terms["alibi_slopes_H"], 6, 9)
        bound = bounds(
            query, key, value, None, {"dropout": 0.2}, truth, added, terms["sinks_H"]
        )  # fmt: skip
        assert_within(found.output, truth.output, bound.output)


@every_dtype
def test_zero_slopes_and_absent_sinks_change_nothing(dtype: torch.dtype) -> None:
    """A slope of 0 adds 0; a sink of -inf is no sink."""
    query, key, value = inputs_of(dtype)
    none = {"alibi_slopes_H": torch.zeros(4), "sinks_H": torch.full((4,), -math.inf)}
    hidden = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    hidden[:, :, 2] = False
    truth = softmax.reference(query, key, value, hidden)
    bound = bounds(query, key, value, hidden, {}, truth)
    for name, term in none.items():
        for outputs in (OUTPUT, ALL):
            found = attend(query, key, value, hidden, **{name: term}, outputs=outputs)
            assert_within(found.output, truth.output, bound.output)
            assert found.weights is None or truth.weights is not None
            if found.weights is not None:
                assert_within(found.weights, truth.weights, bound.weights)
