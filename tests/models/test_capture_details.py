"""Tests of details of calls that `qkv.capture` records or reports, and `qkv.substitute` changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.models.calls import Calls
from qkv.models.capture import CaptureWarning
from qkv.models.interceptor import Interceptor
from qkv.models.model_call import CallOutput, ModelCall, RunOriginal
from support.captured_models import Function, Transformers

F = nn.functional


class CrossAttention(Transformers):
    """A module whose class name says that its keys are of another sequence."""


def eager(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    sinks: Tensor | None = None, **__: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes attention as eager functions of transformers do, with sinks that broadcast."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores if mask is None else scores + mask
    B, H, L, S = scores.shape
    if sinks is not None:
        shape = (1, H, 1, 1) if sinks.ndim == 1 else sinks.shape
        scores = torch.cat([scores, sinks.view(shape).expand(B, H, L, 1)], -1)
    weights = scores.softmax(-1)[..., :S]
    return (weights @ value).transpose(1, 2), weights


def flash(
    module: Transformers, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    sliding_window: int | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes what flash attention of transformers computes, without packed sequences."""
    L, S = query.shape[2], key.shape[2]
    distance = torch.arange(L)[:, None] + S - L - torch.arange(S)
    seen = torch.ones(L, S, dtype=torch.bool)
    if module.is_causal if is_causal is None else is_causal:
        seen &= distance >= 0
    if sliding_window is not None and sliding_window < S:
        seen &= distance.abs() < sliding_window
    return F.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2), None


@pytest.fixture
def flash_model() -> Iterator[nn.Module]:
    """Returns a model whose attention function has the name of flash attention."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("qkv_flash", flash)
    yield Transformers("qkv_flash", flash)
    AttentionInterface._global_mapping.pop("qkv_flash")  # nothing public unregisters it


@contextmanager
def missed(*expected: tuple[str, str]) -> Iterator[None]:
    """Captures warn inside the block of exactly these layers and reasons."""
    with pytest.warns(CaptureWarning) as caught:
        yield
    (warning,) = caught
    listed = "; ".join(f"{layer or 'the model'}: {reason}" for layer, reason in expected)
    assert str(warning.message) == f"attention was not captured: {listed}"


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Calls, Tensor]:
    """Runs a captured model; its output must keep its bits."""
    before = model(*args, **kwargs)
    with qkv.capture(model) as calls, torch.no_grad():
        after = model(*args, **kwargs)
    assert torch.equal(before, after)
    return calls, after


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """The sums have at most 8 terms of size 4 at most; the exponentials double the error."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, atol=64 * eps, rtol=0)


SHAPES = {
    "one query for the batch": ((1, 2, 4, 8), (3, 2, 5, 8), (3, 1, 4, 5)),
    "one head of queries": ((3, 1, 4, 8), (3, 2, 5, 8), (3, 1, 1, 5)),
    "one key for the batch": ((3, 4, 8), (1, 5, 8), (4, 5)),
    "queries without a batch": ((2, 4, 8), (3, 2, 5, 8), (4, 5)),
    "one head without a batch": ((4, 8), (5, 8), (4, 5)),
    "a row for all queries": ((2, 3, 4, 8), (1, 3, 5, 8), (5,)),
    "windows": ((3, 4, 2, 5, 8), (3, 4, 2, 5, 8), (4, 1, 5, 5)),
    "windows, one query": ((1, 4, 2, 5, 8), (3, 1, 2, 5, 8), (3, 1, 1, 1, 5)),
}


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_axes_that_broadcast_are_captured_and_substituted(name: str, is_bool: bool) -> None:
    query_shape, key_shape, mask_shape = SHAPES[name]
    query, key, value = tensors(query_shape, key_shape, (*key_shape[:-1], 6))
    (mask,) = tensors(mask_shape)
    mask = mask < 1 if is_bool else mask
    mask[..., 0] = True if is_bool else 0
    model = Function(F.scaled_dot_product_attention)
    calls, expected = capture(model, query, key, value, mask, scale=0.3)
    (call,) = calls
    assert (call.scale, call.layer) == (0.3, "")
    found = F.scaled_dot_product_attention(call.query, call.key, call.value, call.mask, scale=0.3)
    assert_close(found.reshape(expected.shape), expected)
    assert torch.equal(call.output.reshape(expected.shape), expected)
    with qkv.substitute(model, "softmax"):
        after = model(query, key, value, mask, scale=0.3)
    assert after.shape == expected.shape
    assert_close(after, expected)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_learned_queries_of_a_batch_of_one_are_expanded(name: str) -> None:
    query, key, value = tensors((1, 2, 4, 8), (3, 2, 5, 8), (3, 2, 5, 8))
    model = Transformers(name, eager)
    calls, expected = capture(model, query, key, value, None, is_causal=False)
    (call,) = calls
    assert call.query.shape == (3, 2, 4, 8)
    assert torch.equal(call.output, expected.transpose(1, 2))
    with qkv.substitute(model, "softmax"):
        assert_close(model(query, key, value, None, is_causal=False), expected)


@pytest.mark.parametrize(
    ("width", "is_causal", "window"),
    [
        (None, True, None), (3, True, (2, None)), (3, False, (2, 2)), (6, True, None),
        (6, False, None), (5, False, (4, 4)),
    ],
)  # fmt: skip
def test_window_of_flash_attention(
    flash_model: nn.Module, width: int | None, is_causal: bool, window: Any
) -> None:
    q, k, v = tensors(*[(2, 2, 6, 8)] * 3)
    options = {"sliding_window": width, "is_causal": is_causal}
    calls, expected = capture(flash_model, q, k, v, None, **options)
    (call,) = calls
    assert (call.window, call.causal) == (window, is_causal)
    with qkv.substitute(flash_model, "softmax"):
        assert_close(flash_model(q, k, v, None, **options), expected)


@pytest.mark.parametrize(
    ("options", "is_packed"),
    [
        ({"cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 2, 6]}, True),
        ({"cu_seq_lens_q": [0, 6], "cu_seq_lens_k": [0, 6]}, False),
        ({"position_ids": [[0, 1, 0, 1, 2, 3]]}, True),
        ({"position_ids": [[2, 3, 2, 3, 2, 3]]}, True),
        ({"position_ids": [[2, 3, 4, 5, 6, 7]]}, False),
    ],
)
def test_packed_sequences_of_flash_attention_are_reported(
    flash_model: nn.Module, options: dict[str, Any], is_packed: bool
) -> None:
    q, k, v = tensors(*[(1, 2, 6, 8)] * 3)
    options = {name: torch.tensor(x) for name, x in options.items()}
    if not is_packed:
        calls, _ = capture(flash_model, q, k, v, None, **options)
        assert len(calls) == 1
        return
    with missed(("", "its sequences are packed")):
        calls, _ = capture(flash_model, q, k, v, None, **options)
    assert not len(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mask comes first
        calls, _ = capture(flash_model, q, k, v, torch.ones(1, 6), **options)
    assert len(calls) == 1


def test_sinks_are_recorded_or_reported() -> None:
    q, k, v, sinks, others = tensors(*[(2, 2, 6, 8)] * 3, (2,), (2, 2, 6, 1))
    model = Transformers("eager", eager)
    calls, expected = capture(model, q, k, v, None, sinks=sinks)
    (call,) = calls
    assert call.sinks is not None
    assert torch.equal(call.sinks, sinks)
    assert_close(call.weights() @ call.value, expected.transpose(1, 2))
    with missed(("", "its sinks differ by query")):
        capture(model, q, k, v, None, sinks=others)


def test_unknown_arguments_of_floats_are_reported() -> None:
    q, k, v, bias = tensors(*[(2, 2, 6, 8)] * 3, (6, 6))
    model = Transformers("eager", eager)
    with missed(("", "its argument bias is unknown")):
        capture(model, q, k, v, None, bias=bias)
    harmless = {"position_ids": torch.arange(6)[None], "indices": torch.arange(6), "scaling": None}
    calls, _ = capture(model, q, k, v, None, **harmless)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize("with_padding", [True, False])
def test_masks_of_both_kinds_have_the_dtype_of_the_queries(with_padding: bool) -> None:
    model = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.bfloat16).eval()
    x, mask = tensors((2, 5, 16), (5, 5), dtype=torch.bfloat16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    options = {"key_padding_mask": padding if with_padding else None, "attn_mask": mask}
    handler = Keeper()
    with torch.no_grad(), Interceptor(model, handler, is_recorder=False):
        output, weights = model(x, x, x, need_weights=True, **options)
    assert handler.calls[0].mask is not None
    assert handler.calls[0].mask.dtype == output.dtype == weights.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_a_plain_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module

    # the switch that torch's own warning names
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = nn.Sequential(nn.Identity(), Function(lambda x: module.flex_attention(x, x, x)))
    with missed(("1", "it calls flex_attention itself")):
        calls, _ = capture(model, *tensors((1, 2, 8, 8)))
    assert not len(calls)


def test_model_without_a_visible_call_is_reported() -> None:
    x = torch.ones(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with missed(("", "it ran without an attention call that qkv can see")):
        capture(model, x)
    with qkv.capture(model) as calls:  # nothing runs
        pass
    assert not calls.missed
    with missed(("1", "it made no attention call")), qkv.capture(model, layers=["1"]):
        model(x)


def test_layers_that_are_not_chosen_count_as_seen() -> None:
    model = nn.Sequential(Function(lambda x: F.scaled_dot_product_attention(x, x, x)), nn.ReLU())
    with (
        missed(("1", "it made no attention call")),
        qkv.capture(model, layers=["1"]) as calls,
    ):
        model(torch.ones(1, 2, 3, 4))
    assert not len(calls)


class Keeper:
    """Keeps the calls of a model."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []

    def handle(self, call: ModelCall, run: RunOriginal) -> CallOutput:
        self.calls.append(call)
        return run()

    def miss(self, layer: str, reason: str) -> None:
        raise AssertionError(f"{layer}: {reason}")


@pytest.mark.parametrize("is_recorder", [True, False])
def test_calls_tell_self_attention_from_cross_attention(is_recorder: bool) -> None:
    x, y = tensors((2, 5, 16), (2, 5, 16))
    decoder = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True).eval()
    encoder = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    single = nn.MultiheadAttention(16, 2).eval()
    handler = Keeper()
    with torch.no_grad():
        for model, arguments in ((decoder, (x, y)), (encoder, (x,)), (single, (x + 1, x + 1, x))):
            with Interceptor(model, handler, is_recorder=is_recorder):
                model(*arguments)
    assert [call.is_self for call in handler.calls] == [True, False, True, None]


def test_modules_of_transformers_tell_cross_attention() -> None:
    one, two, three = (cls("eager", eager) for cls in (Transformers, CrossAttention, Transformers))
    vars(three)["is_cross_attention"] = True
    handler = Keeper()
    for model in (one, two, three):
        with Interceptor(model, handler, is_recorder=True):
            model(*tensors(*[(2, 2, 6, 8)] * 3), None)
    assert [call.is_self for call in handler.calls] == [None, False, False]


@pytest.mark.parametrize("shape", [(1, 0, 4, 8), (0, 2, 4, 8), (1, 2, 4, 0)])
def test_empty_queries_are_reported(shape: tuple[int, ...]) -> None:
    model = Function(lambda x: F.scaled_dot_product_attention(x, x, x))
    with missed(("", "its queries are empty")), qkv.capture(model):
        model(torch.ones(shape))
