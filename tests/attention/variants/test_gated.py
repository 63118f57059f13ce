"""Gated and delta rules against outside definitions, exact fractions of them, and extremes."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from qkv.attention.variants import gated
from support.each import each
from support.examples import examples
from support.references import reference_of
from support.variant_bounds import bounds_of, is_near

OUTPUT: Final = frozenset({"output"})
EVERY: Final = frozenset({"output", "weights", "state_weights"})
EPS: Final = torch.finfo(torch.float32).eps
EPS_64: Final = torch.finfo(torch.float64).eps


def attend(*tensors: Any, **parameters: Any) -> Tensor:
    """Returns the output."""
    output = gated.attend(gated.Call(*tensors, **parameters), OUTPUT).output
    assert output is not None
    return output


def reference(*tensors: Any, **parameters: Any) -> Tensor:
    """Returns the output of the reference."""
    output: Tensor = reference_of(gated.Call(*tensors, **parameters)).output
    assert output is not None
    return output


def normal(seed: int, *shape: int) -> Tensor:
    """Returns normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(draw: Any, channels: bool = False) -> dict[str, Tensor]:
    """Draws tokens with keys of norm 1, a decay and a beta, in float32."""
    B, G, S = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 150))
    V, D, E = G * draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**31))
    key = torch.nn.functional.normalize(normal(seed + 1, B, G, S, D), dim=-1)
    size = draw(st.sampled_from((0.01, 1.0, 20.0)))
    return {
        "query": normal(seed, B, G, S, D).float(),
        "key": key.float(),
        "value": normal(seed + 2, B, V, S, E).float(),
        "log_decay": -size * normal(seed + 3, B, V, S, D if channels else 1).abs().float(),
        "beta": torch.sigmoid(normal(seed + 4, B, V, S)).float(),
    }


def assert_near(found: Tensor, expected: Tensor, close: float = 64 * EPS) -> None:
    """Compares with another float32 computation: both round sums of S terms of size 1."""
    size = 1 + float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=close * size * found.shape[2] ** 0.5)


@examples(60)
@given(data=st.data(), normalize=st.booleans())
def test_gated_delta_is_that_of_qwen3_next(data: st.DataObject, normalize: bool) -> None:
    """Key heads may be fewer than value heads; the state has one matrix per value head."""
    x = drawn(data.draw)
    g, beta = x["log_decay"][..., 0].mT, x["beta"].mT
    found = attend(*x.values(), rule="gated_delta", normalize_qk=normalize)
    # the recurrent function takes repeated heads
    repeats = x["value"].shape[1] // x["key"].shape[1]
    query, key = (x[n].repeat_interleave(repeats, 1).transpose(1, 2) for n in ("query", "key"))
    value = x["value"].transpose(1, 2)
    for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        more = {"initial_state": None, "output_final_state": False}
        expected, _ = function(
            query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=normalize, **more
        )
        # the key's norm, used twice, and the query's: D products, their sum, a root, a product
        norms = 3 * (query.shape[-1] / 2 + 3) if normalize else 0
        assert_near(found, expected.transpose(1, 2), (64 + norms) * EPS)


@examples(60)
@given(data=st.data())
def test_decay_per_channel_is_that_of_kimi_linear(data: st.DataObject) -> None:
    x = drawn(data.draw, channels=True)
    repeats = x["value"].shape[1] // x["key"].shape[1]
    query, key = (x[n].repeat_interleave(repeats, 1).transpose(1, 2) for n in ("query", "key"))
    found = attend(*x.values(), rule="gated_delta")
    for function in (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention):
        expected, _ = function(
            query, key, x["value"].transpose(1, 2), g=x["log_decay"].transpose(1, 2),
            beta=x["beta"].mT, initial_state=None, output_final_state=False,
        )  # fmt: skip
        assert_near(found, expected.transpose(1, 2))


@examples(20)
@given(length=st.integers(1, 80), seed=st.integers(0, 2**31), groups=st.sampled_from((1, 2, 4)))
def test_gated_is_mamba_2(length: int, seed: int, groups: int) -> None:
    """Its B is the key, C the query, dt x the value and dt A the decay; D x is a skip beside it."""
    x, key, query = normal(seed, 2, length, 4, 8), *normal(seed + 1, 2, 2, length, groups, 6)
    dt, A, D = normal(seed + 2, 2, length, 4).exp(), -normal(seed + 3, 4).exp(), normal(seed + 4, 4)
    narrow = [t.float() for t in (x, dt, A, key, query)]
    expected = mamba2.mamba2_chunk_scan(*narrow, chunk_size=16, D=D.float())
    query, key, value = (t.float().transpose(1, 2) for t in (query, key, dt[..., None] * x))
    decay = (dt * A).mT[..., None]
    found = attend(query, key, value, decay, rule="gated", scale=1.0)
    skip = (D[:, None] * x).float().transpose(1, 2)
    # Mamba-2 has an exponent as a difference of sums of up to 16 decays, of three roundings each.
    exponent = 16 * 3 * float(decay.unfold(2, min(16, length), 1).sum(-1).abs().max())
    exact = (query, key, value, decay.float())
    mass = reference(*(t.abs() for t in exact[:3]), exact[3], rule="gated", scale=1.0)
    close = (2 * (16 + 4 * query.shape[-1] + 4 * length) + exponent) * EPS * mass
    assert is_near(found + skip, expected.transpose(1, 2), close + 4 * EPS * skip.abs())


@examples(20)
@given(length=st.integers(1, 80), seed=st.integers(0, 2**31))
def test_gated_is_lightning_attention_of_minimax(length: int, seed: int) -> None:
    """Each head has a constant decay, as in RetNet."""
    torch.manual_seed(seed)
    config = MiniMaxConfig(
        hidden_size=16, num_attention_heads=4, head_dim=8, num_hidden_layers=3, block_size=16
    )
    layer = MiniMaxLightningAttention(config, layer_idx=1).eval()
    seen: dict[str, Tensor] = {}
    layer.qkv_proj.register_forward_hook(lambda *a: seen.update(qkv=a[2]))
    layer.norm.register_forward_hook(lambda *a: seen.update(read=a[1][0]))
    with torch.no_grad():
        mask = torch.ones(2, length)
        layer(torch.randn(2, length, 16), position_embeddings=None, attention_mask=mask)
        projected = torch.nn.functional.silu(seen["qkv"]).unflatten(-1, (4, 24))
        query, key, value = projected.transpose(1, 2).split(8, -1)
        decay = -layer.slope_rate.flatten()[None, :, None, None].expand(2, 4, length, 1)
        found = attend(query, key, value, decay, rule="gated", scale=1.0)
    assert_near(found.transpose(1, 2).flatten(2)[:, None], seen["read"][:, None])


@each("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@each("channels", [1, 4])
def test_decay_of_any_size_forgets_and_no_digit_is_lost(dtype: torch.dtype, channels: int) -> None:
    """After a decay of -1000, or of -1e30, small decays still count as if nothing came before."""
    value, query = normal(2, 1, 1, 80, 3).to(dtype), normal(0, 1, 1, 80, 4).to(dtype)
    decay = torch.full((1, 1, 80, channels), -1e-3, dtype=torch.float64)
    for size in (-1000.0, -1e30, -torch.inf):
        decay[:, :, 5] = size
        found = attend(query, query, value, decay, rule="gated")
        alone = [x[:, :, 5:] for x in (query, query, value, decay)]
        truth = reference(*alone, rule="gated")
        mass = reference(*(x.abs() for x in alone[:3]), alone[3], rule="gated")
        eps = max(torch.finfo(dtype).eps, 64 * (EPS if dtype != torch.float64 else EPS_64))
        assert ((found[:, :, 5:] - truth).abs() <= 2 * eps * mass).all()


@pytest.mark.slow
@each("size", [-torch.inf, -1000.0, -300.0, -90.0])
@each("where", ["most", "some", "all"])
@each("rule", ["gated", "gated_delta"])
@each("channels", [1, 4])
def test_float64_is_within_its_bound_after_resets(
    size: float, where: str, rule: Any, channels: int
) -> None:
    """The sums of decays are up to 64,000, whose last digit in float64 is 7e-12."""
    S, state = 64, frozenset({"output", "state"})
    draws = normal(3, 2, 1, 2, S, channels).abs().sigmoid() * 2 - 1
    is_large = {"most": torch.arange(S)[:, None] < 50, "some": draws[1] < 0.3, "all": draws[1] < 2}
    strength = draws[0] if where == "all" and size > -torch.inf else 1.0
    tensors: dict[str, Any] = {
        "query_BJSD": normal(0, 1, 2, S, 4).abs(),
        "key_BGSD": torch.nn.functional.normalize(normal(1, 1, 2, S, 4).abs(), dim=-1),
        "value_BVSE": normal(2, 1, 2, S, 3).abs(),
        "log_decay_BTSZ": torch.where(is_large[where], size * strength, -draws[0]),
    }
    if rule == "gated_delta":
        tensors["beta_BTS"] = torch.sigmoid(normal(4, 1, 2, S))
    truth = reference_of(gated.Call(**tensors, rule=rule))
    bounds = bounds_of("gated", tensors, {"rule": rule}, truth)
    found = gated.attend(gated.Call(**tensors, rule=rule), EVERY)
    for name in EVERY:
        assert is_near(getattr(found, name), getattr(truth, name), bounds[name]), name
    continued = gated.attend(gated.Call(**tensors, rule=rule), state).output
    assert continued is not None
    assert truth.output is not None
    assert is_near(continued, truth.output, bounds["output"])


@each("channels", [1, 4])
def test_sum_of_two_long_decays_has_all_digits(channels: int) -> None:
    """The decay between tokens 0 and 3 is e^-600, and it is all that is left of the value."""
    query, key = normal(0, 1, 1, 4, 4).abs(), normal(1, 1, 1, 4, 4).abs()
    value = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    value[:, :, 0] = 1.0
    decay = torch.zeros(1, 1, 4, channels, dtype=torch.float64)
    decay[:, :, 1], decay[:, :, 3] = -311.7, -288.1
    truth = reference(query, key, value, decay, rule="gated")
    found = attend(query, key, value, decay, rule="gated")
    assert ((found - truth).abs() <= 16 * EPS_64 * truth.abs()).all()


@each("rule", ["gated", "gated_delta"])
@each("channels", [1, 4])
def test_gradient_of_a_long_decay_is_finite(rule: Any, channels: int) -> None:
    """exp of a positive difference of decays would overflow at 709 and make NaN of it."""
    decay = torch.full((1, 1, 70, channels), -50.0, dtype=torch.float64)
    query, value = normal(0, 1, 1, 70, 4), normal(2, 1, 1, 70, 3)
    beta = torch.ones(1, 1, 70, dtype=torch.float64) if rule == "gated_delta" else None
    found = gated.backward(
        gated.Call(query, query, value, decay, beta, rule=rule), normal(5, 1, 1, 70, 3)
    )
    assert all(x.isfinite().all() for x in found.values())
    assert found["log_decay"].any()


def test_unstable_rule_grows_as_the_reference_does() -> None:
    """With beta = 1 and keys of norm 3, the state grows eightfold with each token."""
    key = 3 * torch.nn.functional.normalize(normal(1, 1, 1, 37, 4), dim=-1)
    tensors = normal(0, 1, 1, 37, 4), key, normal(2, 1, 1, 37, 3)
    beta = torch.ones(1, 1, 37, dtype=torch.float64)
    truth = reference(*tensors, None, beta, rule="delta")
    mass = reference(tensors[0].abs(), key.abs(), -tensors[2].abs(), None, -beta, rule="delta")
    assert truth.abs().max() > 1e12
    for dtype in (torch.float64, torch.float32):
        found = attend(*(x.to(dtype) for x in tensors), None, beta.to(dtype), rule="delta")
        bound = 200 * torch.finfo(dtype).eps * mass.abs()
        assert ((found - truth).abs() <= bound).all()


@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each("normalize", [False, True])
@each("rule", ["delta", "gated_delta"])
def test_note_names_the_items_that_may_grow(dtype: torch.dtype, normalize: bool, rule: Any) -> None:
    """The product beta |k|^2 is above 2 at a token that is no padding."""
    key = torch.nn.functional.normalize(normal(1, 4, 2, 9, 16), dim=-1)
    if not normalize:
        key[1] *= 2.0  # |k|^2 = 4
        key[2, :, 7:] *= 2.0  # in the padding
    beta = torch.full((4, 2, 9), 1.9 if dtype == torch.bfloat16 else 2.0, dtype=torch.float64)
    beta[3, 1, 4], beta[2, :, 8], key[2, :, 8] = 2.25, torch.nan, torch.inf
    decay = torch.zeros(4, 2, 9, 1) if rule == "gated_delta" else None
    tensors = normal(0, 4, 2, 9, 16), key, normal(2, 4, 2, 9, 3), decay, beta
    narrow: list[Any] = [x if x is None else x.to(dtype) for x in tensors]
    narrow.append(torch.tensor([9, 9, 7, 9]))
    found = gated.attend(gated.Call(*narrow, rule=rule, normalize_qk=normalize), OUTPUT)
    assert found.notes[gated.UNSTABLE].tolist() == [False, not normalize, False, True]


def test_rule_that_erases_nothing_has_no_note() -> None:
    x = 100 * normal(0, 1, 1, 5, 3)
    assert not gated.attend(gated.Call(x, x, x, -x[..., :1].abs(), rule="gated"), OUTPUT).notes


def test_numbers_beyond_float32_are_computed_in_float64() -> None:
    """The product of query and key overflows float32; the small values bring it back."""
    query, key = torch.full((1, 1, 3, 2), 1e25), torch.full((1, 1, 3, 2), 1e25)
    value = torch.full((1, 1, 3, 2), 1e-30)
    found = attend(query, key, value, scale=1.0)
    assert_near(found / 2e20, torch.tensor([1.0, 2.0, 3.0])[:, None].expand(1, 1, 3, 2))
    # the squares of normalize_qk fit too
    huge = torch.full((1, 1, 1, 2), 3e38)
    assert_near(
        attend(huge, huge, huge / huge, normalize_qk=True), torch.full((1, 1, 1, 2), 0.5**0.5)
    )
