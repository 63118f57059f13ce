"""Tests of `qkv.substitute`."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qkv
from qkv.attention.variants import linear
from qkv.models.substitution import SubstituteWarning
from qkv.models.variants import VariantFunction
from support.captured_models import CASES, FAMILIES, build, run_model, state_of
from support.references import reference_of
from support.service import Server

EPS = torch.finfo(torch.float32).eps


class Attention(nn.Module):
    """Multi-head attention by torch's SDPA; key heads may be fewer."""

    def __init__(self, heads: int = 4, key_heads: int = 2, width: int = 8) -> None:
        super().__init__()
        M = heads * width
        self.heads, self.key_heads = heads, key_heads
        self.q, self.o = nn.Linear(M, M), nn.Linear(M, M)
        self.k, self.v = (nn.Linear(M, key_heads * width) for _ in range(2))

    def forward(self, x_BLM: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Returns (B, L, M)."""
        query = self.q(x_BLM).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            f(x_BLM).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for f in (self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, enable_gqa=True
        )
        merged: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return merged


class Stack(nn.Module):
    """Layers of attention with residuals."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x_BLM: Tensor, **options: Any) -> Tensor:
        """Returns (B, L, M)."""
        for layer in self.layers:
            x_BLM = x_BLM + layer(x_BLM, **options)
        return x_BLM


def embeddings(B: int = 2, L: int = 6) -> Tensor:
    return torch.randn(B, L, 32)


def error(found: Tensor, expected: Tensor) -> float:
    """Returns the relative error in the Frobenius norm."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm())


def test_softmax_for_softmax_changes_nothing_but_rounding() -> None:
    model, x = Stack(), embeddings()
    before = model(x, causal=True)
    with qkv.substitute(model, "softmax") as report:
        after = model(x, causal=True)
    assert error(after, before) < 16 * EPS
    assert [row.layer for row in report.rows] == ["layers.0", "layers.1", "layers.2"]
    assert all(row.heads == (0, 1, 2, 3) and row.calls == 1 for row in report.rows)


def test_chosen_layer_runs_the_variant_and_others_their_own_attention() -> None:
    model, x = Stack(), embeddings()
    with (
        qkv.substitute(model, {"layers.1": "linear"}) as report,
        qkv.capture(model) as calls,
    ):
        model(x)
    own = [call.run(outputs=["output"]).output for call in calls]
    assert error(calls[0].output, own[0]) < 16 * EPS
    query, key, value = (t.double() for t in (calls[1].query, calls[1].key, calls[1].value))
    expected = reference_of(linear.Call(query, key, value))
    assert expected.output is not None
    assert error(calls[1].output, expected.output) < 16 * EPS
    (row,) = report.rows
    assert row.variant == "linear"
    assert row.relative_change == pytest.approx(error(calls[1].output, own[1]), rel=1e-4)


def test_chosen_heads_run_the_variant_and_others_keep_their_bits() -> None:
    model, x = Stack(1), embeddings()
    with qkv.capture(model) as before:
        model(x)
    choice = {"layers.0": {"variant": "linear", "heads": [3, 0]}}
    with qkv.substitute(model, choice) as report, qkv.capture(model) as after:
        model(x)
    kept = [1, 2]
    assert torch.equal(before[0].output[:, kept], after[0].output[:, kept])
    linear_output = before[0].run("linear", outputs=["output"]).output
    assert error(after[0].output[:, [0, 3]], linear_output[:, [0, 3]]) < 16 * EPS
    assert report.rows[0].heads == (3, 0)


def test_last_fitting_pattern_counts() -> None:
    model, x = Stack(), embeddings()
    with qkv.substitute(model, {"*": "linear", "layers.2": "softmax"}) as report:
        model(x)
    assert [row.variant for row in report.rows] == ["linear", "linear", "softmax"]


@pytest.mark.parametrize("heads", [None, [1]])
@pytest.mark.parametrize("variant", ["sigmoid", "linear", "taylor", "efficient"])
def test_padded_batch_has_the_output_of_each_sequence_alone(
    variant: str, heads: list[int] | None
) -> None:
    """`sigmoid` has a default bias of -log S, so it must not count the keys of the padding."""
    choice: dict[str, Any] = {"variant": variant, "heads": heads}
    model, x = Stack(2), embeddings(B=2, L=7)
    visible = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    visible[0, ..., 5:] = False  # padding at the end
    visible[1, ..., :3] = False  # padding at the start
    with qkv.substitute(model, choice) as report:
        together = model(x, mask=visible)
        change = report.rows[0].relative_change
        alone = [model(x[:1, :5]), model(x[1:, 3:])]
    assert error(together[:1, :5], alone[0]) < 16 * EPS
    assert error(together[1:, 3:], alone[1]) < 16 * EPS
    with qkv.substitute(model, choice) as report:
        model(x[:1, :5])
        model(x[1:, 3:])
    assert change == pytest.approx(report.rows[0].relative_change, rel=1e-5)


def test_padding_keeps_the_output_of_the_own_attention() -> None:
    model, x = Stack(1), embeddings(B=2, L=7)
    visible = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    visible[0, ..., 5:] = False
    before = model(x, mask=visible)
    with qkv.substitute(model, "linear"):
        after = model(x, mask=visible)
    assert torch.equal(after[0, 5:], before[0, 5:])
    assert error(after[0, :5], before[0, :5]) > 1e-3


def test_causal_mask_with_padding_is_causal_for_variants_without_masks() -> None:
    model, x = Stack(2), embeddings(B=2, L=7)
    visible = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7).clone()
    visible[0, ..., 5:] = False
    with qkv.substitute(model, "linear"):
        together = model(x, mask=visible)
        alone = model(x[:1, :5], causal=True)
        whole = model(x[1:], causal=True)
    assert error(together[:1, :5], alone) < 16 * EPS
    assert error(together[1:], whole) < 16 * EPS


def test_mask_that_a_variant_does_not_take_is_refused_by_name() -> None:
    model, x = Stack(1), embeddings()
    bias = torch.randn(1, 4, 6, 6)
    with (
        pytest.raises(qkv.QkvError, match=r"layers\.0: linear takes no mask"),
        qkv.substitute(model, "linear"),
    ):
        model(x, mask=bias)
    with qkv.substitute(model, "sigmoid"):
        model(x, mask=bias)


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("lineer", "lineer"),
        ({"layers.9": "linear"}, "no layer 'layers.9'"),
        ({"layers.0": {"variant": "linear", "head": [0]}}, "substitute is invalid"),
        ({"variant": "linear", "heads": 3}, "heads is invalid: got 3, expected a list of integers"),
        ({"layers.0": {"variant": "taylor", "parameters": {"x": 1}}}, "no parameter 'x'"),
        ({}, "variants is invalid"),
    ],
)
def test_wrong_choice_is_refused_before_the_model_runs(variants: Any, message: str) -> None:
    with pytest.raises(qkv.QkvError, match=message), qkv.substitute(Stack(), variants):
        raise AssertionError


@pytest.mark.parametrize("heads", [[4], [-1], [0, 0], []])
def test_wrong_heads_are_refused_by_layer(heads: list[int]) -> None:
    model = Stack(1)
    with (
        pytest.raises(qkv.QkvError, match=r"0 to 3 in layers\.0"),
        qkv.substitute(model, {"variant": "linear", "heads": heads}),
    ):
        model(embeddings())


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = Stack()
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(RuntimeError), qkv.substitute(model, "linear"):
        model(torch.randn(2, 6, 31))
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_layer_that_is_not_called_is_reported() -> None:
    model = Stack()
    with (
        pytest.warns(SubstituteWarning, match="layers.2.o: no attention call"),
        qkv.substitute(model, {"layers.2.o": "linear", "layers.0": "linear"}),
    ):
        model(embeddings())


def test_compiled_layer_is_reported() -> None:
    model = Stack(1)
    model.layers[0].compile(backend="eager")
    with (
        pytest.warns(SubstituteWarning, match=r"layers\.0: a compiled graph"),
        qkv.substitute(model, "linear"),
    ):
        pass


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_each_unused_pattern_is_reported_beside_missed_layers() -> None:
    model = nn.ModuleDict({"a": torch.jit.script(nn.Linear(2, 2)), "b": Attention()})
    with (
        pytest.warns(SubstituteWarning, match="a: a TorchScript.*; b: no attention call was made$"),
        qkv.substitute(model, {"a": "linear", "b": "taylor"}),
    ):
        pass


def test_pattern_whose_layers_another_takes_is_reported_as_such() -> None:
    model = Stack()
    with (
        pytest.warns(SubstituteWarning, match=r": layers\.0: another pattern took its layers$"),
        qkv.substitute(model, {"layers.0": "linear", "*": "taylor"}) as report,
    ):
        model(embeddings())
    assert {row.variant for row in report.rows} == {"taylor"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_report_counts_no_recomputed_call(use_reentrant: bool) -> None:
    model, x = Stack(1), embeddings().requires_grad_()
    with qkv.substitute(model, "linear") as report:
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [row.calls for row in report.rows] == [1]
    assert x.grad is not None


class Encoder(nn.Module):
    """An nn.TransformerEncoder, or one layer of nn.MultiheadAttention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor, **options: Any) -> Any:
        """Returns what the inner module returns."""
        return self.inner(*inputs, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
@pytest.mark.parametrize("has_padding", [False, True])
def test_transformer_encoder_runs_the_variant_in_place_of_its_fast_path(has_padding: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), embeddings()
    padding = torch.arange(6).expand(2, 6) >= torch.tensor([[6], [4]]) if has_padding else None
    before = model(x, src_key_padding_mask=padding)
    with qkv.substitute(model, "softmax") as report:
        after = model(x, src_key_padding_mask=padding)
    shown = slice(None) if padding is None else ~padding
    assert error(after[shown], before[shown]) < 64 * EPS
    assert [row.layer for row in report.rows] == ["layers.0.self_attn", "layers.1.self_attn"]
    with qkv.substitute(model, "linear"):
        assert error(model(x, src_key_padding_mask=padding)[shown], before[shown]) > 1e-3


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_multihead_attention_returns_the_weights_of_the_variant(
    batch_first: bool, average: bool
) -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=batch_first), embeddings()
    with qkv.capture(model) as calls:
        model(x, x, x)
    with qkv.substitute(model, "linear"):
        output, weights = model(x, x, x, average_attn_weights=average)
    expected = calls[0].weights(variant="linear")
    assert error(weights, expected.mean(1) if average else expected) < 16 * EPS
    assert output.shape == x.shape


def test_gradients_are_those_of_the_closed_form() -> None:
    tensors = {
        name: torch.randn(1, heads, 4, 3, dtype=torch.float64, requires_grad=True)
        for name, heads in (("query", 2), ("key", 1), ("value", 1))
    }

    def attend(*inputs: Tensor) -> Tensor:
        return VariantFunction("taylor", {"causal": True})(dict(zip(tensors, inputs, strict=True)))

    assert torch.autograd.gradcheck(attend, tuple(tensors.values()))


def test_gradients_of_a_model_are_those_of_its_own_attention() -> None:
    model, x = Stack(2).double(), embeddings().double()
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    inputs = [*model.parameters(), bias]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x, mask=bias).square().sum(), inputs)

    own = gradients()
    with qkv.substitute(model, "softmax"):
        found = gradients()
    largest = max(float(each.abs().max()) for each in own)
    for one, other in zip(found, own, strict=True):
        # the terms of a gradient may cancel, as in that of a key's bias
        assert float((one - other).abs().max()) < 1e3 * torch.finfo(torch.float64).eps * largest


def test_model_can_be_trained_with_a_variant() -> None:
    model, x, target = Stack(1), embeddings(), embeddings()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with qkv.substitute(model, "linear"):
        for _ in range(60):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_second_derivative_is_refused() -> None:
    model, x = Stack(1), embeddings().requires_grad_()
    with qkv.substitute(model, "linear"):
        loss = model(x).square().sum()
    with pytest.raises(qkv.QkvError, match="linear has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("variants", ["softmax", {"layers.1": {"variant": "linear", "heads": [1]}}])
def test_service_computes_output_and_gradients(server: Server, variants: Any) -> None:
    model, x = Stack(2), embeddings()

    def run(client: qkv.Client | None) -> list[Tensor]:
        with qkv.substitute(model, variants, client=client):
            output = model(x, causal=True)
            parameters = list(model.parameters())
            return [output.detach(), *torch.autograd.grad(output.square().sum(), parameters)]

    with qkv.Client(server.url) as client:
        remote = run(client)
    for found, expected in zip(remote, run(None), strict=True):
        scale = float(expected.abs().max()) or 1.0
        assert float((found - expected).abs().max()) < 256 * EPS * max(scale, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    model, x = Stack(1).to(dtype), embeddings().to(dtype)
    before = model(x)
    with qkv.substitute(model, "softmax"):
        after = model(x)
        loss = after.float().square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert after.dtype == dtype
    assert {g.dtype for g in gradients} == {dtype}
    assert error(after.float(), before.float()) < 4 * torch.finfo(dtype).eps


def test_threads_share_a_substitution() -> None:
    model, x = Stack(), embeddings()
    with qkv.substitute(model, "linear"):
        expected = model(x)
    found: list[Tensor] = []
    with qkv.substitute(model, "linear") as report:
        threads = [threading.Thread(target=lambda: found.append(model(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, expected) for each in found)
    assert [row.calls for row in report.rows] == [4, 4, 4]


def test_other_model_is_not_substituted() -> None:
    model, other, x = Stack(1), Stack(1), embeddings()
    before = other(x)
    with qkv.substitute(model, "linear"):
        model(x)
        assert torch.equal(other(x), before)


def test_kl_is_that_of_the_predictions() -> None:
    before, after = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    log_p, log_q = (x.double().log_softmax(-1) for x in (before, after))
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    with qkv.substitute(model := Stack(1), "linear") as report:
        model(embeddings())
    assert report.kl(before, after) == pytest.approx(float(each.mean()))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    expected = float(each[mask.bool()].mean())
    assert report.kl(before, after, mask) == pytest.approx(expected)
    assert report.kl(before, before) == 0.0
    never = before.clone()
    never[..., 0] = -math.inf
    assert math.isfinite(report.kl(never, before))
    with pytest.raises(qkv.QkvError, match="logits differ in shape"):
        report.kl(before, after[:1])


def test_report_is_a_table() -> None:
    model = Stack(2)
    with qkv.substitute(
        model, {"layers.0": "linear", "layers.1": {"variant": "taylor", "heads": [0, 2]}}
    ) as report:
        model(embeddings())
    text = report.table()
    assert "layers.0" in text
    assert "0–3" in text
    assert "0, 2" in text
    assert "2 layers" in repr(report)
    assert "<table" in report._repr_html_()


@pytest.mark.parametrize("heads", [None, [1, 2]])
@pytest.mark.parametrize("variant", ["softmax", "linear", "efficient", "sigmoid", "taylor"])
def test_autocast_narrows_no_sum_of_a_variant(variant: str, heads: list[int] | None) -> None:
    model, x = Stack(1), embeddings()
    visible = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    visible[0, ..., 4:] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with (
            qkv.substitute(model, {"variant": variant, "heads": heads}),
            qkv.capture(model) as calls,
        ):
            output = model(x, mask=visible)
        inside = calls[0].run("softmax", outputs=["output"]).output
    outside = calls[0].run("softmax", outputs=["output"]).output
    assert torch.equal(inside, outside)
    assert calls[0].output.dtype == torch.bfloat16
    gradients = torch.autograd.grad(output.float().square().sum(), list(model.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_empty_inputs_run_the_own_attention() -> None:
    model = Stack(1)
    with pytest.warns(SubstituteWarning), qkv.substitute(model, "linear"):
        assert model(torch.randn(0, 6, 32)).shape == (0, 6, 32)


def test_inner_substitution_counts_where_two_choose_the_same_heads() -> None:
    model, x = Stack(2), embeddings()
    with qkv.substitute(model, {"layers.1": "taylor", "layers.0": "linear"}):
        expected = model(x)
    with (
        qkv.substitute(model, "linear"),
        qkv.substitute(model, {"layers.1": "taylor"}),
    ):
        found = model(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "implementation"), [case for case in CASES if case[1] != "flex_attention"]
)
def test_softmax_for_softmax_changes_nothing_in_models_of_transformers(
    name: str, implementation: str
) -> None:
    family, model = FAMILIES[name], build(name, implementation)
    before, state = run_model(model, family.batch()), state_of(model)
    with qkv.substitute(model, "softmax") as report:
        after = run_model(model, family.batch())
    assert [row.layer for row in report.rows] == list(family.layers)
    assert state_of(model) == state
    assert len(after) == len(before) > 0
    for one, other in zip(after, before, strict=True):
        # a few roundings of each of two layers, whose weights have norms of about 1
        assert float((one - other).norm() / other.norm()) < 32 * EPS


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_is_that_of_the_whole_sequence(name: str) -> None:
    model = build(name, "sdpa")
    tokens = FAMILIES[name].batch()["input_ids"]
    with qkv.substitute(model, "linear"):
        found = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
        again = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(found, again)
