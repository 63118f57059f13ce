"""Softmax at the ends of the dtypes' ranges: huge inputs, masks, values, and garbage in padding."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.variants import softmax
from support.checked_softmax import ALL, OUTPUT, attend
from support.dtypes import DTYPES, exact_dtype
from support.each import each
from support.examples import examples
from support.references import reference_of
from support.tolerances import assert_within, bounds, spread


def exactly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns bounds of the weights, and the outputs, of an (L, D) request in exact fractions.

    The bound on a score is that of `bounds`, computed exactly; the interval is that of `spread`.
    """
    L, D, S = *query.shape, len(key)
    eps = Fraction(torch.finfo(exact_dtype(query.dtype)).eps)
    q, k, v = ([[Fraction(float(x)) for x in row] for row in t] for t in (query, key, value))
    top = torch.full((L, S), -math.inf, dtype=torch.float64)
    error = torch.zeros_like(top)
    for i in range(L):
        seen = [j for j in range(S) if not (causal and j > i)]
        added = {j: 0.0 if mask is None else float(mask[i, j]) for j in seen}
        seen = [j for j in seen if added[j] != -math.inf]
        products = {j: [a * b for a, b in zip(q[i], k[j], strict=True)] for j in seen}
        scores = {j: Fraction(scale) * sum(products[j]) + Fraction(added[j]) for j in seen}
        largest = max((abs(s) for s in scores.values()), default=Fraction(0))
        for j, score in scores.items():
            size = abs(Fraction(scale)) * sum(map(abs, products[j]))
            off = eps * ((D + 8) * size + 2 * abs(Fraction(added[j])) + 5 * abs(score) + largest)
            top[i, j] = float(max(score - max(scores.values()), Fraction(-(2**1000))))
            error[i, j] = float(min(off, Fraction(2**1000)))
    least, most = spread(top, error)
    average = torch.zeros(L, value.shape[1], dtype=torch.float64)
    truth = top.softmax(-1).nan_to_num(0.0)
    for i, e in np.ndindex(L, value.shape[1]):
        mass = sum((Fraction(float(a)) for a in truth[i]), Fraction(0)) or Fraction(1)
        terms = (Fraction(float(truth[i, j])) * v[j][e] for j in range(S))
        average[i, e] = float(sum(terms, Fraction(0)) / mass)
    return least, most, average


HUGE: Final = {
    torch.float64: (1e200, 1.7e308, 1e-100),
    torch.float32: (1e20, 3e38, 1e-30),
    torch.bfloat16: (1e30, 3e38, 1e-30),
    torch.float16: (6e4, 1e-4),
}


@st.composite
def extremes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    """Draws a tiny request of zero, ordinary and extreme numbers."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = (0.0, 1.0, 1.5, *HUGE[dtype])
    numbers = st.sampled_from(sizes + tuple(-x for x in sizes))
    L, S, D, E = (draw(st.integers(1, n)) for n in (3, 4, 2, 2))

    def matrix(rows: int, columns: int) -> Tensor:
        row = st.lists(numbers, min_size=columns, max_size=columns)
        drawn = draw(st.lists(row, min_size=rows, max_size=rows))
        return torch.tensor(drawn, dtype=torch.float64).to(dtype)

    query, key, value = matrix(L, D), matrix(S, D), matrix(S, E)
    mask = None
    if draw(st.booleans()):
        kind = exact_dtype(dtype)
        most = torch.finfo(kind).max
        entry = st.sampled_from((0.0, -math.inf, 2.0, -1e4, -most, most / 4))
        row = st.lists(entry, min_size=S, max_size=S)
        mask = torch.tensor(draw(st.lists(row, min_size=L, max_size=L)), dtype=kind)
    scale = draw(st.sampled_from((1.0, 0.5, -2.0, 1e9, 0.0)))
    return query, key, value, mask, scale, draw(st.booleans())


@pytest.mark.slow
@examples(400)
@given(extremes())
def test_finite_inputs_of_any_size_give_finite_and_right_outputs(
    request: tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool],
) -> None:
    query, key, value, mask, scale, causal = request
    least, most, average = exactly(*request)
    dtype, S = query.dtype, len(key)
    eps, narrow = torch.finfo(exact_dtype(dtype)).eps, torch.finfo(dtype).eps
    tiny = torch.finfo(exact_dtype(dtype)).tiny
    batch = [x[None, None] for x in (query, key, value)]
    if mask is not None:
        batch.append(mask[None, None])
    for outputs in (OUTPUT, ALL):
        found = attend(*batch, scale=scale, causal=causal, outputs=outputs)
        assert found.output is not None
        assert found.output.isfinite().all()
        slack = (most - least) + (S + 64) * eps * most + tiny
        largest = value.double().abs()
        # the sum itself may overflow if all terms are added at once
        bound = slack @ (largest / 4) + (S * eps + 3 * narrow) * (most @ (largest / 4))
        bound = bound + narrow * torch.finfo(dtype).tiny * S * max(1.0, float(largest.max()) / 4)
        error = (found.output[0, 0].double() / 4 - average / 4).abs()
        assert (error <= bound).all(), (found.output, average)
        if found.weights is not None:
            A = found.weights[0, 0].double()
            margin = (S + 64) * eps * most + tiny
            assert (A >= least - margin).all(), (A, least)
            assert (A <= most + margin).all(), (A, most)
            assert found.scores is not None
            assert not found.scores.isnan().any()
            hidden = torch.ones(len(query), S).triu(1).bool() & causal
            if mask is not None:
                hidden |= mask == -math.inf
            assert (found.scores[0, 0][hidden] == -math.inf).all()


@each(
    ("dtype", "size"),
    [
        (torch.float32, 1e20), (torch.float32, 3e38),
        (torch.float64, 1e200), (torch.float64, 1.7e308),
        (torch.bfloat16, 1e30), (torch.float16, 6e4),
    ],
)  # fmt: skip
@each("outputs", [OUTPUT, ALL])
def test_huge_inputs_give_one_hot_weights(
    dtype: torch.dtype, size: float, outputs: frozenset[str]
) -> None:
    """The largest score gets all weight, ties share it, and a row of zeros is the plain mean."""
    query = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=dtype) * size
    key = torch.tensor([[1.0, 0.0], [0.5, 0.0], [1.0, 0.0], [-1.0, 1.0]], dtype=dtype) * size
    value = torch.tensor([[1.0], [2.0], [3.0], [6.0]], dtype=dtype)
    for factor in (1.0, size / 8):  # huge values too
        found = attend(*(x[None, None] for x in (query, key, value * factor)), outputs=outputs)
        assert found.output is not None
        expected = torch.tensor([2.0, 6.0, 3.0], dtype=dtype) * factor
        assert_within(
            found.output[0, 0, :, 0], expected.double(), expected.double() * torch.finfo(dtype).eps
        )
        if found.weights is not None:
            taken = [[0.5, 0, 0.5, 0], [0, 0, 0, 1], [0.25] * 4]
            assert torch.equal(found.weights[0, 0].double(), torch.tensor(taken).double())


def test_huge_token_does_not_change_earlier_rows() -> None:
    """Causal rows that do not see the token, and all-zero rows, do not depend on it."""
    plain = torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64)[None, None]
    huge = torch.cat([plain, torch.full((1, 1, 1, 1), 1.7e308, dtype=torch.float64)], 2)
    value = torch.eye(4, dtype=torch.float64)[None, None]
    expected = attend(plain, plain, value[:, :, :3, :3], causal=True, outputs=ALL).weights
    found = attend(huge, huge, value, causal=True, outputs=ALL).weights
    assert expected is not None
    assert found is not None
    close = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found[:, :, :3, :3], expected, rtol=0, atol=close)
    mask = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    still = torch.cat([torch.zeros_like(plain[:, :, :1]), huge[:, :, 3:]], 2)
    for query in (still, still.flip(2)):
        row = int(query[0, 0, 1, 0] == 0)
        found = attend(query, huge, value, mask[None, None, None], outputs=ALL).weights
        assert found is not None
        torch.testing.assert_close(found[0, 0, row], mask.softmax(0), rtol=0, atol=close)


def test_one_row_may_hold_huge_and_tiny_numbers() -> None:
    """Scaling a row to a safe size must not lose small numbers that meet large ones."""
    query = torch.tensor([[1.7e308, 1e-100]], dtype=torch.float64)[None, None]
    key = torch.tensor([[0.0, 1e100], [0.0, 2e100]], dtype=torch.float64)[None, None]
    value = torch.eye(2, dtype=torch.float64)[None, None]
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = attend(query, key, value, scale=1.0, outputs=ALL)
    close = 64 * torch.finfo(torch.float64).eps
    assert_within(found.scores, expected[None, None, None], close)
    assert_within(found.weights, expected.softmax(0)[None, None, None], close)


def test_hidden_score_that_overflows_stays_hidden() -> None:
    """The mask is floating, and adding its -inf to inf would give NaN."""
    query = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)[None, None]
    key = torch.tensor([[0.0], [1.7e308]], dtype=torch.float64)[None, None]
    mask = torch.tensor([0.0, -math.inf], dtype=torch.float64)[None, None, None]
    for scale in (2.0, -2.0):
        found = attend(query, key, key, mask, scale=scale, outputs=ALL)
        assert torch.equal(found.output, torch.zeros_like(query))  # type: ignore[arg-type]
        assert torch.equal(found.scores, mask.expand(1, 1, 2, 2))  # type: ignore[arg-type]


@each("mask", [None, torch.ones(1, 1, 1, 1).bool(), torch.zeros(1, 1, 1, 1)])
@each(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_single_key_whose_score_overflows(
    mask: Tensor | None, dtype: torch.dtype, size: float
) -> None:
    """A score of -inf by overflow is not a masked score."""
    query, value = torch.full((1, 1, 2, 4), size, dtype=dtype), torch.tensor([[[[5.0]]]]).to(dtype)
    found = attend(query, -query[:, :, :1], value, mask, outputs=ALL)
    assert torch.equal(found.output, value.expand(1, 1, 2, 1))  # type: ignore[arg-type]
    assert torch.equal(found.weights, torch.ones(1, 1, 2, 1, dtype=dtype))  # type: ignore[arg-type]


@each("dtype", DTYPES)
@each("mask_dtype", DTYPES)
def test_masks_of_the_lowest_finite_number(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """finfo.min hides a key beside ordinary ones; a row of finfo.min alone is still averaged."""
    query, key, value = (torch.randn(1, 2, 3, 4).to(dtype) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3, dtype=mask_dtype)
    mask[..., 0, 1:] = mask[..., 2, :] = torch.finfo(mask_dtype).min
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, mask, outputs=outputs)
        assert found.output is not None
        assert found.output.isfinite().all()
        assert torch.equal(found.output[:, :, 0], value[:, :, 0])
        assert found.output[:, :, 2].any()
        if found.weights is not None:
            row = found.weights[:, :, 2].sum(-1).double()
            assert_within(row, torch.ones_like(row), 5 * torch.finfo(exact_dtype(dtype)).eps)


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wide_mask_on_narrow_queries(dtype: torch.dtype) -> None:
    """-1e300 is finite: it hides a key, but a row of -1e300 alone is still averaged."""
    query, key, value = (torch.randn(1, 1, 2, 4).to(dtype) for _ in range(3))
    mask = torch.tensor([[0.0, -1e300], [-1e300, -1e300]], dtype=torch.float64)[None, None]
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, mask, outputs=outputs)
        assert found.output is not None
        assert torch.equal(found.output[0, 0, 0], value[0, 0, 0])
        mean = value[0, 0].double().mean(0)
        bound = 4 * torch.finfo(dtype).eps * value.double().abs().amax()
        assert_within(found.output[0, 0, 1], mean, bound)


SINK_VALUES: Final = (1e4, -1e4, 300.0, -300.0, 3e38, -3e38)


@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each("sink", SINK_VALUES)
def test_sinks_of_any_size(dtype: torch.dtype, sink: float) -> None:
    """A large sink takes all the weight, a small one none, beside scores of any size."""
    query, key, value = (torch.randn(1, 2, 3, 4).to(dtype) for _ in range(3))
    sinks = torch.tensor([sink, 0.0], dtype=dtype)
    for factor in (1.0, 1e18):
        tensors = (query * factor, key * factor, value)
        truth = reference_of(softmax.Call(*tensors, sinks_H=sinks))
        bound = bounds(*tensors, None, {}, truth, sinks_H=sinks)
        for outputs in (OUTPUT, ALL):
            found = attend(*tensors, sinks_H=sinks, outputs=outputs)
            assert_within(found.output, truth.output, bound.output)
            if found.weights is not None:
                assert_within(found.weights, truth.weights, bound.weights)
            if sink > 1e3 and factor == 1.0:
                assert found.output is not None
                assert not found.output[:, 0].any()


@each("softcap", [None, 5.0])
@each("sign", [1.0, -1.0])
@each(("dtype", "slope"), [(torch.float32, 1e30), (torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_slopes_of_any_size(
    dtype: torch.dtype, slope: float, sign: float, softcap: float | None
) -> None:
    """The nearest key on the slope's side has all the weight, also if every product overflows."""
    query, key, value = (torch.randn(1, 2, n, 4).to(dtype) for n in (3, 5, 5))
    hidden = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    hidden[..., 0, 4] = hidden[..., 0, 0] = False
    slopes = torch.full((2,), sign * slope, dtype=dtype)
    for kind in (dtype, torch.float64):
        for outputs in (OUTPUT, ALL):
            found = attend(
                query, key, value, hidden, None, slopes.to(kind), query_offset=-9,
                softcap=softcap, outputs=outputs,
            )  # fmt: skip
            assert found.output is not None
            last = (3, 4) if sign > 0 else (1, 0)
            assert torch.equal(found.output[:, :, 0], value[:, :, last[0]])
            assert torch.equal(found.output[:, :, 1:], value[:, :, [last[1]] * 2])
            if found.weights is not None:
                assert_within(found.weights.sum(-1), torch.ones(1, 2, 3).double(), 0.0)
            if found.scores is not None:
                assert not found.scores.isnan().any()


@each("softcap", [None, 5.0])
def test_huge_slopes_and_sinks_together(softcap: float | None) -> None:
    """Scores, slopes and sinks near the end of float64's range are compared exactly."""
    query, key = torch.zeros(1, 3, 1, 1).double(), torch.zeros(1, 1, 3, 1).double()
    value = torch.tensor([[[[1.0], [2.0], [3.0]]]]).double()
    slopes = torch.tensor([-1.7e308, -1.7e308, 1e308], dtype=torch.float64)
    sinks = torch.tensor([1.7e308, -1.7e308, 1.5e308], dtype=torch.float64)
    for outputs in (OUTPUT, ALL):
        found = attend(
            query, key, value, None, None, slopes, sinks, softcap=softcap, outputs=outputs
        )
        assert found.output is not None
        # the scores are 0, slope and 2 slope: the sink, the first key and the last key win
        assert found.output.flatten().tolist() == [0.0, 1.0, 3.0]
        assert not found.output.isnan().any()
