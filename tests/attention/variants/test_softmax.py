"""Softmax attention against its float64 reference, torch, and textbook properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qkv.attention.common import explicit_outputs, fused_kernel
from qkv.attention.variants import softmax
from support.checked_softmax import ALL, OUTPUT, attend, weights
from support.dtypes import every_dtype, exact_dtype
from support.examples import examples
from support.softmax_requests import Request, requests
from support.tolerances import assert_within, bounds


@examples(600)
@given(requests(), st.none() | st.integers(1, 300))
def test_agrees_with_reference(request: Request, block: int | None) -> None:
    """Covers every parameter, with and without weights, whole or in blocks of `block` elements."""
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(fused_kernel, "BIAS_ELEMENTS", block)
            patch.setattr(explicit_outputs, "_SCORE_ELEMENTS", block)
        assert_agrees_with_reference(request)


def assert_agrees_with_reference(request: Request) -> None:
    """Checks numbers, dtypes, zeros, sums and row blocks against the reference."""
    query, key, value, mask, lengths = tensors = request.tensors()
    truth = softmax.reference(*tensors, **request.parameters)
    assert truth.weights is not None
    assert truth.scores is not None
    bound = bounds(query, key, value, mask, request.parameters, truth)
    exact = exact_dtype(request.dtype)
    blind = truth.scores.amax(-1) == -math.inf

    for outputs in (OUTPUT, frozenset({"weights"}), frozenset({"scores"}), ALL):
        found = attend(*tensors, **request.parameters, outputs=outputs)
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
            rounding = (request.S + 2) * torch.finfo(exact).eps
            assert_within(found.weights.sum(-1), (~blind).double(), rounding)
        if found.weights is not None:
            assert not found.weights[truth.scores == -math.inf].any()

    start = request.seed % request.L
    rows = slice(start, start + 1 + request.seed % (request.L - start))
    part = weights(query, key, mask, lengths, **request.parameters)(rows)
    assert part.dtype == exact
    assert_within(part, truth.weights[:, :, rows], bound.weights[:, :, rows])


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"causal": True},
        {"causal": True, "query_offset": "end", "window": (600, None)},
        {"window": (20, 30), "query_offset": 500, "softcap": 3.0},
        {"dropout": 0.5, "seed": 2**63, "causal": True, "query_offset": 700},
    ],
    ids=str,
)
def test_lengths_above_the_blocks_of_the_kernel(
    dtype: torch.dtype, parameters: dict[str, Any]
) -> None:
    """The fused kernel processes 512 keys, and 32 or more queries, at a time."""
    lengths = (1100, 601)
    assert_agrees_with_reference(
        Request(
            dtype, B=2, G=1, K=2, L=70, S=1100, D=24, E=16, spread=2.0, mask=None,
            key_lengths=lengths, garbage=1.0, seed=5, parameters=parameters,
        )
    )  # fmt: skip
    assert_agrees_with_reference(
        Request(
            dtype, B=1, G=1, K=1, L=300, S=1030, D=24, E=24, spread=2.0,
            mask=(torch.float32, (False, False, False, True), 0.5),
            key_lengths=None, garbage=0.0, seed=5, parameters=parameters,
        )
    )  # fmt: skip


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-2.0, -1e-3, 0.0])
def test_zero_and_negative_scales(dtype: torch.dtype, causal: bool, scale: float) -> None:
    """A kernel that masks with -inf before it scales gives inf or NaN for these."""
    assert_agrees_with_reference(
        Request(
            dtype, B=1, G=2, K=1, L=5, S=5, D=4, E=4, spread=1.0, mask=None, key_lengths=None,
            garbage=0.0, seed=1, parameters={"causal": causal, "scale": scale},
        )
    )  # fmt: skip


@examples(60)
@given(requests())
def test_weights_times_values_are_the_output(request: Request) -> None:
    """weights @ value is the output for any request, within the rounding of that product."""
    query, key, value, mask, lengths = request.tensors()
    if lengths is not None:
        value = value.nan_to_num(0.0, 0.0, 0.0)
    response = attend(query, key, value, mask, lengths, **request.parameters, outputs=ALL)
    assert response.weights is not None
    v = value.double().repeat_interleave(request.K, 1)
    A = response.weights.double()
    exact, narrow = torch.finfo(exact_dtype(request.dtype)), torch.finfo(request.dtype)
    # S products and sums, one rounding of weights that were computed wider, one cast
    bound = ((request.S + 2) * exact.eps + narrow.eps) * (A.abs() @ v.abs()) + narrow.eps
    assert_within(response.output, A @ v, bound)


@examples(60)
@given(requests(dropout=False), st.randoms(use_true_random=False))
def test_key_order_changes_nothing(request: Request, random: Any) -> None:
    assume(request.key_lengths is None and not request.parameters.get("causal"))
    assume(request.parameters.get("window") is None)
    query, key, value, mask, _ = request.tensors()
    order = random.sample(range(request.S), request.S)
    permuted = mask[..., order] if mask is not None and mask.shape[3] > 1 else mask
    truth = softmax.reference(query, key, value, mask, **request.parameters)
    bound = bounds(query, key, value, mask, request.parameters, truth)
    for outputs in (OUTPUT, ALL):
        found = attend(
            query, key[:, :, order], value[:, :, order], permuted,
            **request.parameters, outputs=outputs,
        )  # fmt: skip
        assert_within(found.output, truth.output, bound.output)


# ---------------------------------------------------------------- the textbook


@every_dtype
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


@every_dtype
def test_one_key_returns_the_value_exactly(dtype: torch.dtype) -> None:
    query, key = torch.randn(2, 4, 5, 8).to(dtype), torch.randn(2, 2, 1, 8).to(dtype)
    value = torch.randn(2, 2, 1, 3).to(dtype)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, outputs=outputs)
        assert torch.equal(found.output, value.repeat_interleave(2, 1).expand(2, 4, 5, 3))  # type: ignore[arg-type]


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch_attention(dtype: torch.dtype, causal: bool) -> None:
    """The oracle is torch's function in float64 on the same inputs."""
    query, key, value = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal
    )
    truth = softmax.reference(query, key, value, causal=causal)
    bound = bounds(query, key, value, None, {}, truth)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, causal=causal, outputs=outputs)
        assert_within(found.output, expected, bound.output)


def test_agrees_with_torch_multihead_attention() -> None:
    """The projections are taken from nn.MultiheadAttention; there is a key padding mask."""
    B, H, L, S, M = 2, 4, 5, 6, 24
    module = torch.nn.MultiheadAttention(M, H, batch_first=True, dtype=torch.float64).eval()
    query, memory = torch.randn(B, L, M).double(), torch.randn(B, S, M).double()
    lengths = torch.tensor([6, 3])
    with torch.no_grad():
        expected, mean = module(
            query, memory, memory, key_padding_mask=torch.arange(S) >= lengths[:, None]
        )
        w, b = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        heads = [
            (x @ w[i].T + b[i]).unflatten(-1, (H, -1)).transpose(1, 2)
            for i, x in enumerate((query, memory, memory))
        ]
        found = attend(*heads, key_lengths_B=lengths, outputs=ALL)
        assert found.output is not None
        assert found.weights is not None
        output = module.out_proj(found.output.transpose(1, 2).flatten(2))
    close = 100 * M * torch.finfo(torch.float64).eps  # three products of width M, all of size 1
    torch.testing.assert_close(output, expected, rtol=0, atol=close)
    torch.testing.assert_close(found.weights.mean(1), mean, rtol=0, atol=close)


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


def test_causal_aligns_as_torch_does() -> None:
    """The alignment is top-left for L != S unless query_offset is set; rows may see nothing."""
    query, key, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 2)
    for offset, seen in ((0, (1, 2, 3)), (2, (3, 4, 5)), (-2, (0, 0, 1)), (9, (5, 5, 5))):
        for outputs in (OUTPUT, ALL):
            found = attend(query, key, value, causal=True, query_offset=offset, outputs=outputs)
            assert found.output is not None
            for i, count in enumerate(seen):
                row = found.output[:, :, [i]]
                if not count:
                    assert not row.any()
                    continue
                one = (query[:, :, [i]], key[:, :, :count], value[:, :, :count])
                truth = softmax.reference(*one)
                assert_within(row, truth.output, bounds(*one, None, {}, truth).output)
