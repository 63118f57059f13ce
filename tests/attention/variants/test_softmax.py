"""Softmax attention against its float64 reference, and textbook properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given

from support.agreement import assert_agrees
from support.checked_softmax import ALL, OUTPUT, attend
from support.drawn_requests import Request, requests
from support.dtypes import DTYPES
from support.each import each
from support.examples import examples
from support.tolerances import assert_within
from support.variant_calls import VARIANTS


@pytest.mark.slow
@each("dtype", DTYPES)
@each(
    "parameters",
    [
        {},
        {"causal": True},
        {"causal": True, "query_offset": "end", "window": (600, None)},
        {"window": (20, 30), "query_offset": 500, "softcap": 3.0},
        {"dropout": 0.5, "seed": 2**63, "causal": True, "query_offset": 700},
    ],
)
def test_lengths_above_the_blocks_of_the_kernel(
    dtype: torch.dtype, parameters: dict[str, Any]
) -> None:
    """The fused kernel processes 512 keys, and 32 or more queries, at a time."""
    query = 2 * torch.randn(2, 2, 70, 24, dtype=torch.float64).to(dtype)
    key, value = 2 * torch.randn(2, 1, 1100, 24).to(dtype), torch.randn(2, 1, 1100, 16).to(dtype)
    key[1, :, 601:] = value[1, :, 601:] = 1.0
    lengths = torch.tensor([1100, 601])
    assert_agrees("softmax", query, key, value, None, lengths, **parameters)
    query, key = (2 * torch.randn(1, 1, n, 24).to(dtype) for n in (300, 1030))
    value = torch.randn(1, 1, 1030, 24).to(dtype)
    mask = 3 * torch.randn(1, 1, 1, 1030).masked_fill(torch.rand(1030) < 0.5, -math.inf)
    assert_agrees("softmax", query, key, value, mask, **parameters)


@examples(60)
@given(requests(VARIANTS["softmax"]))
def test_weights_times_values_are_the_output(request: Request) -> None:
    """Within the rounding of that product; rows sum to 1, or to less with a sink."""
    call = request.arguments()
    if "key_lengths_B" in call:
        call["value_BGSE"] = call["value_BGSE"].nan_to_num(0.0, 0.0, 0.0)
    found = attend(**call, outputs=ALL)
    assert found.weights is not None
    assert found.scores is not None
    v, A = call["value_BGSE"].double(), found.weights.double()
    v, S = v.repeat_interleave(A.shape[1] // v.shape[1], 1), v.shape[2]
    exact, narrow = torch.finfo(found.weights.dtype), torch.finfo(call["value_BGSE"].dtype)
    # S products and sums, one rounding of weights that were computed wider, one cast
    bound = ((S + 2) * exact.eps + narrow.eps) * (A.abs() @ v.abs()) + narrow.eps
    assert_within(found.output, A @ v, bound)
    if not call.get("dropout"):
        sums, rounding = found.weights.sum(-1), (S + 2) * exact.eps
        assert (sums <= 1 + rounding).all()
        if "sinks_H" not in call:
            sees = (found.scores.amax(-1) > -torch.inf).double()
            assert_within(sums, sees, rounding)


# ---------------------------------------------------------------- the textbook


@each("dtype", DTYPES)
def test_fused_kernel_runs_if_only_the_sum_of_its_output_overflows(dtype: torch.dtype) -> None:
    """The sum of 65,536 threes overflows float16; an inf among the values is still detected."""
    query, key = (torch.randn(1, 8, 128, 64).to(dtype) for _ in "qk")
    value = torch.full((1, 8, 128, 64), 3.0, dtype=dtype)
    found = attend(query, key, value, outputs=OUTPUT)
    assert found.backend == "sdpa"
    assert_within(found.output, value.double(), 3 * 128 * torch.finfo(dtype).eps)
    value[0, 3, 5, 7] = math.inf
    found = attend(query, key, value, outputs=OUTPUT)
    assert found.backend == "explicit"
    assert found.output is not None
    assert found.output.isinf().nonzero()[:, [1, 3]].unique(dim=0).tolist() == [[3, 7]]


def test_window_and_offset_by_example() -> None:
    """All scores are equal, so a weight is one over the number of visible keys."""
    one = torch.zeros(1, 1, 3, 1)
    keys = torch.zeros(1, 1, 5, 1)
    found = attend(one, keys, keys, window=(1, 0), query_offset="end", outputs=ALL)
    expected = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]) / 2
    assert torch.equal(found.weights, expected[None, None])  # type: ignore[arg-type]
    lengths = torch.tensor([4])
    found = attend(one, keys, keys, None, lengths, causal=True, query_offset="end", outputs=ALL)
    expected = torch.tensor([[1 / 2, 1 / 2, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0], [1 / 4] * 5])
    expected[2, 4] = 0
    assert_within(found.weights, expected[None, None].double(), 2**-23)
