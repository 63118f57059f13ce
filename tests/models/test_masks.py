"""Tests of the parts of a call: padding, causality and windows found in its mask."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import Part, parts_of, whole_of
from support.captured_models import FAMILIES, LENGTH, build
from support.examples import examples

_LOWEST: Final = torch.finfo(torch.float32).min


def call_of(
    mask: Tensor | None, B: int, L: int, S: int, *, H: int = 1, **fields: Any
) -> AttentionCall:
    known: dict[str, Any] = {
        "index": 0, "layer": "attention", "causal": False, "query_offset": 0, "scale": 1.0,
        "softcap": None, "window": None, "sinks": None, "heads": tuple(range(H)),
        "items": tuple(range(B)), **fields,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(B, H, n, 4, generator=generator) for n in (L, S, S))
    return AttentionCall(
        query=query, key=key, value=value, output=torch.zeros(B, H, L, 4), mask=mask, **known
    )


def band(L: int, S: int, offset: int, window: tuple[int | None, int | None] | None) -> Tensor:
    """Returns the pairs (L, S) of causality and a window, one by one."""
    left, right = window or (None, None)
    return torch.tensor(
        [[(right is None or j - i - offset <= right) and (left is None or i + offset - j <= left)
          for j in range(S)] for i in range(L)]
    ).reshape(L, S)  # fmt: skip


def visible_of(call: AttentionCall, parts: list[Part]) -> Tensor:
    """Returns the pairs (B, H, L, S) that parts see."""
    B, H, L, _ = call.query.shape
    S = call.key.shape[2]
    found = torch.zeros(B, H, L, S, dtype=torch.bool)
    for part in parts:
        queries = torch.arange(L) if part.queries is None else part.queries
        keys = torch.arange(S) if part.keys is None else part.keys
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if part.causal or part.window is not None:
            left, right = part.window or (None, None)
            window = left, 0 if part.causal else right
            seen = band(len(queries), len(keys), part.query_offset, window)
        for n, item in enumerate(part.items):
            pairs = seen.expand(H, -1, -1)
            if part.mask is not None:
                assert not part.causal
                mask = part.mask.expand(len(part.items), H, len(queries), len(keys))[n]
                pairs = mask if mask.dtype == torch.bool else mask > _LOWEST / 2
            for head in range(H):
                found[item, head][queries[:, None], keys] = pairs[head]
    return found


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, bool, bool]:
    """Draws visible pairs (B, 1, L, L) by causality, window and padding; and two flags of form."""
    B, L = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    causal = draw(st.booleans())
    width = draw(st.none() | st.integers(1, L)) if causal else None
    window = None if width is None else width - 1, 0
    seen = band(L, L, 0, window) if causal else torch.ones(L, L, dtype=torch.bool)
    pairs = seen.repeat(B, 1, 1, 1)
    for item in range(B):
        begin = draw(st.integers(0, L - 1))
        end = draw(st.integers(begin + 1, L))
        pairs[item, :, :, :begin] = False
        pairs[item, :, :, end:] = False
    return pairs, draw(st.booleans()), draw(st.booleans())


@examples(150)
@given(batches())
def test_parts_say_exactly_what_a_padded_batch_sees(batch: tuple[Tensor, bool, bool]) -> None:
    pairs, is_floating, has_bias = batch
    B, _, L, S = pairs.shape
    bias = torch.linspace(-1, 1, S) if has_bias and is_floating else torch.zeros(S)
    mask = bias.expand(pairs.shape).masked_fill(~pairs, _LOWEST) if is_floating else pairs
    call = call_of(mask, B, L, S)
    parts = parts_of(call)
    # queries at padded positions are left out, and keys that then nobody sees
    real = pairs.any(2)[:, 0]
    expected = pairs & real[:, None, :, None]
    assert torch.equal(visible_of(call, parts), expected)
    assert sorted(item for part in parts for item in part.items) == list(range(B))
    if not (has_bias and is_floating):
        assert all(part.mask is None for part in parts)


@examples(100)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_parts_of_any_mask_say_exactly_what_it_says(
    B: int, H: int, L: int, S: int, causal: bool, random: Any
) -> None:
    pairs = torch.tensor([random.random() < 0.5 for _ in range(B * H * L * S)])
    pairs = pairs.reshape(B, H, L, S)
    offset = S - L
    call = call_of(pairs, B, L, S, H=H, causal=causal, query_offset=offset, layer="encoder_attn")
    expected = pairs & band(L, S, offset, (None, 0)) if causal else pairs
    assert torch.equal(visible_of(call, parts_of(call)), expected)


def test_call_without_a_mask_is_one_part() -> None:
    call = call_of(None, 3, 4, 6, causal=True, query_offset=2, window=(3, None))
    assert (
        parts_of(call)
        == [whole_of(call)]
        == [Part((0, 1, 2), None, None, True, 2, (3, None), None)]
    )


@pytest.mark.parametrize("layer", ["cross_attn", "decoder.encoder_attn", "EncDecAttention"])
def test_queries_of_cross_attention_are_no_padding(layer: str) -> None:
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask[1, ..., 2:] = False
    first, second = parts_of(call_of(mask, 2, 4, 4, layer=layer))
    assert (first.items, first.queries, first.keys) == ((0,), None, None)
    assert second.queries is None
    assert second.keys is not None
    assert second.keys.tolist() == [0, 1]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_padding_of_a_real_model_is_found(name: str, side: str, implementation: str) -> None:
    model, batch = build(name, implementation), FAMILIES[name].batch()
    if side == "left":
        batch = {key: x.flip(1) for key, x in batch.items()}
    with qkv.capture(model) as calls, torch.no_grad():
        model(**batch)
    for call in calls:
        whole, padded = parts_of(call)
        assert (whole.items, whole.queries, whole.keys) == ((0,), None, None)
        assert padded.items == (1,)
        expected = list(range(LENGTH - 2)) if side == "right" else list(range(2, LENGTH))
        assert padded.queries is not None
        assert padded.keys is not None
        assert padded.queries.tolist() == padded.keys.tolist() == expected
        for part in (whole, padded):
            assert (part.mask, part.query_offset) == (None, 0)
            assert part.causal is (name != "bert")
            assert part.window == ((2, None) if name == "mistral" else None)


@pytest.mark.parametrize("hidden", [-math.inf, _LOWEST, -1e9, -65504.0, -1e4])
def test_large_negative_numbers_hide_as_a_boolean_mask_does(hidden: float) -> None:
    pairs = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    pairs[1, ..., 3:] = False
    bias = torch.zeros(pairs.shape).masked_fill(~pairs, hidden)
    found, expected = (parts_of(call_of(mask, 2, 5, 5)) for mask in (bias, pairs))
    assert len(found) == len(expected) == 2
    assert found[1].queries is not None
    assert found[1].queries.tolist() == [0, 1, 2]
    assert [part.mask for part in found] == [None, None]


def test_key_that_no_query_reads_is_no_padding_if_the_mask_is_another() -> None:
    strictly_causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(-1)
    strictly_causal[..., 0, 0] = True
    (part,) = parts_of(call_of(strictly_causal, 1, 6, 6))
    assert part.queries is None
    assert part.keys is not None
    assert part.keys.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_left", [False, True])
def test_padding_of_a_prompt_in_a_static_cache_is_left_out(is_left: bool) -> None:
    real = torch.tensor([False, False, True, True, True])
    real = real if is_left else real.flip(0)
    pairs = torch.ones(5, 5, dtype=torch.bool).tril() & real
    mask = torch.nn.functional.pad(pairs, (0, 4))[None, None]  # four places for later keys
    (part,) = parts_of(call_of(mask, 1, 5, 9))
    assert part.queries is not None
    assert torch.equal(part.queries, real.nonzero()[:, 0])
    assert (part.causal, part.query_offset, part.mask) == (True, 0, None)


def test_window_of_a_call_counts_where_padding_hides_keys_too() -> None:
    mask = torch.ones(1, 1, 1, 10, dtype=torch.bool)
    mask[..., :2] = False
    (part,) = parts_of(call_of(mask, 1, 1, 10, query_offset=9, window=(2, None), causal=True))
    assert part.keys is not None
    assert part.keys.tolist() == [7, 8, 9]
    assert (part.window, part.mask) == (None, None)


def test_window_on_both_sides_is_a_window() -> None:
    distance = torch.arange(6)[:, None] - torch.arange(6)
    (part,) = parts_of(call_of((distance.abs() <= 1)[None, None], 1, 6, 6))
    assert (part.causal, part.query_offset, part.window) == (False, 0, (1, 1))


def test_mask_that_items_share_is_one_part() -> None:
    bias = torch.randn(1, 2, 4, 4)
    (part,) = parts_of(call_of(bias, 3, 4, 4, H=2))
    assert part.items == (0, 1, 2)
    assert part.mask is not None
    assert part.mask.shape == (1, 2, 4, 4)
