"""Tests of attention rollout and of the mass that keys receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv import Client
from qkv.errors import InvalidContent
from qkv.models import rollout
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from qkv.models.model_call import Missed
from support.attention_calls import calls_of, make_call, padding_mask, weights_of_head
from support.peak_memory import needs_proc, peaks

ROUNDING = 1000 * torch.finfo(torch.float64).eps
LAYERS = 3


def chain(**options: Any) -> Calls:
    """Returns the calls of three layers."""
    return calls_of(*(make_call(f"layer.{n}", **options) for n in range(LAYERS)))


def weights_of(call: AttentionCall, item: int, visible: Tensor, variant: str = "softmax") -> Tensor:
    """Returns the weights (H, L, S) of a sequence, in plain numpy."""
    group = call.query.shape[1] // call.key.shape[1]
    found = []
    for head, query in enumerate(call.query[item]):
        key = call.key[item, head // group]
        rows = weights_of_head(variant, query, key, visible, call.scale)
        found.append(torch.from_numpy(rows))
    return torch.stack(found)


def product(matrices: list[Tensor], residual: float = 0.5) -> Tensor:
    """Returns the rollout of matrices (L, L), as a plain product of the last to the first."""
    found = torch.eye(len(matrices[0]), dtype=torch.float64)
    for a in matrices:
        mixed = residual * torch.eye(len(a), dtype=torch.float64) + (1 - residual) * a
        found = mixed / mixed.sum(1, keepdim=True) @ found
    return found


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("causal", [False, True])
def test_rollout_is_the_plain_product(causal: bool, residual: float, heads: str) -> None:
    calls = chain(B=2, H=4, G=2, L=6, causal=causal)
    visible = torch.ones(6, 6, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    found = calls.rollout(residual=residual, heads=heads)
    over = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    for item in range(2):
        matrices = [over[heads](weights_of(call, item, visible)) for call in calls]
        expected = product(matrices, residual)
        torch.testing.assert_close(found[item], expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("items", [[2, 0], [1, 2, 0]])
def test_chosen_rows_and_sequences_are_those_of_the_whole(items: list[int]) -> None:
    calls = chain(B=3, L=7)
    whole = calls.rollout()
    found = calls.rollout(rows=[6, 0], items=items)
    torch.testing.assert_close(found, whole[items][:, [6, 0]], rtol=ROUNDING, atol=ROUNDING)


def test_blocks_of_any_size_have_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = chain(B=3, L=7, mask=padding_mask([4, 7, 4], 7))
    whole = calls.rollout()
    for size in (1, 700):  # the real sizes bound memory: calls of several blocks take seconds
        monkeypatch.setattr(rollout, "_BLOCK_BYTES", size)
        monkeypatch.setattr(rollout, "_BATCH_BYTES", size)
        torch.testing.assert_close(calls.rollout(), whole, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("variant", ["softmax", "linear"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_has_no_rows_and_no_columns(left: bool, variant: str) -> None:
    lengths, S = [3, 6, 3], 6
    calls = chain(B=3, L=S, mask=padding_mask(lengths, S, left=left))
    found = calls.rollout(variant=variant)
    mass = calls.received(variant=variant)
    for item, length in enumerate(lengths):
        at = slice(S - length, S) if left else slice(0, length)
        visible = torch.ones(length, length, dtype=torch.bool)
        alone = [
            replace(call, query=call.query[:, :, at], key=call.key[:, :, at]) for call in calls
        ]
        weights = [weights_of(call, item, visible, variant) for call in alone]
        expected = torch.zeros(S, S, dtype=torch.float64)
        expected[at, at] = product([w.mean(0) for w in weights])
        torch.testing.assert_close(found[item], expected, rtol=ROUNDING, atol=ROUNDING)
        for call, own in zip(calls, weights, strict=True):
            received = torch.zeros(2, S, dtype=torch.float64)
            received[:, at] = own.mean(1)
            torch.testing.assert_close(
                mass[call.layer][item], received, rtol=ROUNDING, atol=ROUNDING
            )


def test_each_sequence_has_its_own_mask() -> None:
    masks = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    calls = chain(B=2, mask=masks)
    found = calls.rollout(items=[1])
    matrices = [call.weights()[1].double().mean(0) for call in calls]
    torch.testing.assert_close(found[0], product(matrices), rtol=ROUNDING, atol=ROUNDING)


def test_query_that_sees_no_key_keeps_its_residual() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 2] = False
    found = chain(L=4, mask=mask).rollout()
    assert found[0, 2].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 4, dtype=torch.float64))


def test_sequence_that_is_all_padding_is_zero() -> None:
    calls = chain(B=2, mask=padding_mask([0, 5], 5))
    assert not calls.rollout()[0].any()
    assert not calls.received()["layer.0"][0].any()


def test_mass_is_averaged_over_layers_and_heads() -> None:
    calls = chain(B=2, L=4)
    found = calls.received()
    assert list(found) == calls.layers
    assert len(found) == LAYERS
    expected = torch.stack([call.weights().mean((1, 2)) for call in calls]).mean(0)
    torch.testing.assert_close(found.mean(), expected, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(found.mean().sum(-1), torch.ones(2, dtype=torch.float64))
    longer = calls_of(*calls, make_call("other", B=2, L=5)).received()
    with pytest.raises(InvalidContent, match="other has other sequences than the first layer"):
        longer.mean()


def test_cross_attention_has_a_mass_and_no_rollout() -> None:
    calls = calls_of(make_call("a.encoder", L=4), make_call("b.cross_attn", L=3, S=4))
    assert calls.received()["b.cross_attn"].shape == (1, 2, 4)
    with pytest.raises(InvalidContent, match=r"b\.cross_attn is cross-attention"):
        calls.rollout()
    assert calls.rollout(layers=["a"]).shape == (1, 4, 4)


def test_call_says_itself_if_it_is_self_attention() -> None:
    calls = calls_of(make_call("a.cross_attn", is_self=True))
    assert calls.rollout().shape == (1, 5, 5)
    with pytest.raises(InvalidContent, match=r"b\.self_attn is cross-attention"):
        calls_of(make_call("b.self_attn", is_self=False)).rollout()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [([0, 1], "a was called more than once"), ([0, 0], r"got \[0, 0\], expected different")],
)
def test_mass_of_a_layer_is_that_of_one_call(numbers: list[int], message: str) -> None:
    calls = calls_of(make_call("a"), make_call("a"))
    with pytest.raises(InvalidContent, match=message):
        calls.received(calls=numbers)
    assert torch.equal(calls.received(calls=[1])["a"], calls_of(calls[1]).received()["a"])


@pytest.mark.parametrize(
    ("calls", "options", "message"),
    [
        ([], {}, "there are no calls"),
        ([make_call("a", L=3, S=5)], {}, "a has 3 queries and 5 keys"),
        ([make_call("a", L=3), make_call("b", L=4)], {}, "b does not follow a: got 4 tokens"),
        ([make_call("a"), make_call("b", B=2)], {"items": [1]}, "no call of a has all"),
        ([make_call("a"), make_call("a")], {}, "a was called more than once"),
        ([make_call("a"), make_call("a", items=(1,))], {}, r"choose sequences with `items`"),
        ([make_call("a")], {"layers": ["b"]}, "no call is of a layer 'b'"),
        ([make_call("a")], {"layers": "a"}, "layers is invalid: got 'a', expected a list"),
        ([make_call("a")], {"calls": [1]}, r"calls is invalid: got \[1\]"),
        ([make_call("a")], {"items": [3]}, "items is invalid"),
        ([make_call("a")], {"rows": [5]}, r"rows is invalid: got \[5\]"),
        ([make_call("a")], {"rows": []}, "rows is invalid"),
        ([make_call("a")], {"rows": 2}, "rows is invalid: got 2, expected a list of integers"),
        ([make_call("a")], {"rows": "12"}, "rows is invalid: got '12', expected a list"),
        ([make_call("a")], {"rows": [True]}, r"rows is invalid: got \[True\], expected a list"),
        ([make_call("a")], {"items": 0}, "items is invalid: got 0, expected a list of integers"),
        ([make_call("a")], {"calls": 0}, "calls is invalid: got 0, expected a list of integers"),
        ([make_call("a")], {"layers": 3}, "layers is invalid: got 3, expected a list of names"),
        ([make_call("a")], {"layers": [3]}, r"layers is invalid: got \[3\], expected a list"),
        ([make_call("a")], {"heads": [0]}, r"heads is invalid: got \[0\], expected mean, max"),
        ([make_call("a")], {"residual": "1"}, "residual is invalid: got '1', expected 0 to 1"),
        ([make_call("a", B=0)], {}, "a has 0 sequences of 5 tokens: expected at least one"),
        ([make_call("a", L=0)], {}, "a has 1 sequences of 0 tokens: expected at least one"),
        ([make_call("a")], {"heads": "sum"}, "heads is invalid: got 'sum'"),
        ([make_call("a")], {"residual": 1.5}, "residual is invalid: got 1.5"),
        ([make_call("a")], {"window": 3, "variant": "linear"}, "window"),
    ],
)
def test_calls_that_are_no_chain_are_refused(
    calls: list[AttentionCall], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidContent, match=message):
        calls_of(*calls).rollout(**options)


def test_layer_that_was_not_captured_breaks_the_chain() -> None:
    calls = chain()
    calls.missed.append(Missed("layer.9", "it has no softmax"))
    with pytest.raises(InvalidContent, match=r"layer\.9 was not captured: it has no softmax"):
        calls.rollout()
    assert calls.rollout(layers=["layer.*"]).shape == (1, 5, 5)
    assert len(calls.received()) == LAYERS


def test_one_of_several_passes_is_chosen_by_its_calls() -> None:
    first, second = chain(), chain()
    both = calls_of(*first, *second)
    found = both.rollout(calls=range(LAYERS, 2 * LAYERS))
    torch.testing.assert_close(found, second.rollout(), rtol=0, atol=0)
    shared = calls_of(*(replace(call, layer="shared") for call in first))  # as ALBERT does
    found = shared.rollout(calls=range(LAYERS))
    torch.testing.assert_close(found, first.rollout(), rtol=0, atol=0)


def test_service_has_the_same_rollout_and_mass(url: str) -> None:
    calls = chain(B=2, L=5, mask=padding_mask([3, 5], 5))
    with Client(url) as client:
        found, mass = calls.rollout(client=client), calls.received(client=client)
    torch.testing.assert_close(found, calls.rollout(), rtol=ROUNDING, atol=ROUNDING)
    expected = calls.received()
    for layer in calls.layers:
        torch.testing.assert_close(mass[layer], expected[layer], rtol=ROUNDING, atol=ROUNDING)


@needs_proc
@pytest.mark.slow
def test_rollout_and_mass_of_long_sequences_take_bounded_memory() -> None:
    """The weights of one layer are 256 MiB."""
    script = """
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
torch.set_num_threads(1)
calls, shape = Calls(), (1, 64, 1024, 8)
for n in range(2):
    calls.append(AttentionCall(
        f"layer.{n}", torch.randn(shape), torch.randn(shape), torch.randn(shape), causal=True,
        index=n, output=torch.zeros(shape), scale=0.3, heads=tuple(range(64)), items=(0,),
    ))
start()
calls.rollout(rows=[1023])
say()
calls.received()
say()
"""
    for peak in peaks(script):
        assert peak.above < 128 << 20
