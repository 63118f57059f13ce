"""Tests of `qkv.capture` on `nn.MultiheadAttention` and the transformer layers of torch."""

from __future__ import annotations

import warnings
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.models.capture import CaptureWarning
from support.captured_models import state_of, tensors_of

M: Final = 16
HEADS: Final = 4


def project(module: nn.MultiheadAttention, output_BHLE: Tensor) -> Tensor:
    """Returns the module's output (B, L, M) of the heads' outputs."""
    with torch.no_grad():
        projected: Tensor = module.out_proj(output_BHLE.transpose(1, 2).flatten(2))
    return projected


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Checks float32 outputs: sums of 16 products, three times over, of numbers of about 1."""
    found, expected = found.detach(), expected.detach()
    bound = 3 * M * torch.finfo(torch.float32).eps * float(expected.abs().max().clamp(min=1))
    assert float((found - expected).abs().max()) <= bound


MODULES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "without-bias": {"bias": False},
    "widths": {"kdim": 12, "vdim": 10},
    "bias-kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "bias-kv-zero": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS: Final = ("none", "bool", "float", "per-head", "padding", "both", "float-padding")


def masks_of(kind: str, B: int, L: int, S: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(L, S, generator=generator) < 0.3
    hidden[:, 0] = False
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[-1, S - 2 :] = True
    bias = torch.randn(L, S, generator=generator)
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": bias},
        "per-head": {"attn_mask": hidden.expand(B * HEADS, -1, -1)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "float-padding": {
            "attn_mask": bias,
            "key_padding_mask": torch.zeros(B, S).masked_fill(padding, -torch.inf),
        },
    }[kind]


@pytest.mark.parametrize("needs_weights", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention_is_captured(name: str, masks: str, needs_weights: bool) -> None:
    options = MODULES[name]
    module = nn.MultiheadAttention(M, HEADS, batch_first=True, **options).eval()
    query = torch.randn(2, 5, M)
    key, value = (
        torch.randn(2, 7, options.get("kdim", M)),
        torch.randn(2, 7, options.get("vdim", M)),
    )
    arguments: dict[str, Any] = {**masks_of(masks, 2, 5, 7), "need_weights": needs_weights}
    for no_gradients in (True, False):  # with and without torch's fast path
        with torch.set_grad_enabled(not no_gradients):
            before = tensors_of(
                [x for x in module(query, key, value, **arguments) if x is not None]
            )
            with qkv.capture(module) as calls:
                during = tensors_of(
                    [x for x in module(query, key, value, **arguments) if x is not None]
                )
        assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
        (call,) = calls
        S = 7 + options.get("add_bias_kv", False) + options.get("add_zero_attn", False)
        assert (call.layer, call.key.shape) == ("", (2, HEADS, S, M // HEADS))
        assert_close(project(module, call.output), before[0])
        assert_close(call.run("softmax", outputs=["output"]).output, call.output)
        if needs_weights:
            assert_close(call.weights().mean(1), before[1])


@pytest.mark.parametrize("shape", ["batch-first", "length-first", "unbatched"])
def test_layout_of_the_inputs_does_not_matter(shape: str) -> None:
    module = nn.MultiheadAttention(M, HEADS, batch_first=shape == "batch-first").eval()
    x = torch.randn(3, 5, M) if shape != "unbatched" else torch.randn(5, M)
    expected = module(x, x, x)[0]
    with qkv.capture(module) as calls:
        assert torch.equal(module(x, x, x)[0], expected)
    batch = {"batch-first": expected, "length-first": expected.transpose(0, 1)}
    assert_close(project(module, calls[0].output), batch.get(shape, expected[None]))


@pytest.mark.parametrize("needs_weights", [True, False])
def test_dropout_of_the_model_keeps_its_random_numbers(needs_weights: bool) -> None:
    module = nn.MultiheadAttention(M, HEADS, dropout=0.4, batch_first=True).train()
    x = torch.randn(2, 6, M)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        return module(x, x, x, need_weights=needs_weights)[0], torch.rand(3)

    expected, numbers = run()
    with qkv.capture(module) as calls:
        found, others = run()
    assert torch.equal(found, expected)
    assert torch.equal(others, numbers)
    assert (calls[0].dropout, calls.missed) == (0.4, [])
    assert_close(project(module, calls[0].output), expected)


def build_encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(M, HEADS, 24, batch_first=True, **options)
    nested = not options.get("norm_first", False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


@pytest.fixture
def fast_layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that gets, for each layer on torch's fast path, True if it is nested."""
    seen: list[bool] = []
    original = torch._transformer_encoder_layer_fwd  # nothing else tells that torch took this path

    def spy(src: Tensor, *arguments: Any) -> Tensor:
        seen.append(src.is_nested)
        return original(src, *arguments)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", spy)
    return seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_fast_path_of_an_encoder_is_taken_and_captured(
    norm_first: bool, is_padded: bool, fast_layers: list[bool]
) -> None:
    model = build_encoder(norm_first=norm_first)
    x = torch.randn(3, 6, M)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [3]]) if is_padded else None
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        taken = list(fast_layers)
        with qkv.capture(model) as calls:
            found = model(x, src_key_padding_mask=padding)
    assert torch.equal(found, expected)
    assert taken == [is_padded and not norm_first] * 2
    assert fast_layers == taken * 2
    assert calls.missed == []
    assert calls.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    slow = build_encoder(norm_first=norm_first)
    slow.load_state_dict(model.state_dict())
    with qkv.capture(slow) as others:
        slow(x, src_key_padding_mask=padding)  # with gradients: not the fast path
    assert fast_layers == taken * 2
    for call, other in zip(calls, others, strict=True):
        assert_close(call.run("softmax", outputs=["output"]).output, call.output)
        for item, length in enumerate([6, 4, 3] if is_padded else [6, 6, 6]):
            real = slice(0, length)
            assert_close(call.query[item, :, real], other.query[item, :, real])
            assert_close(call.output[item, :, real], other.output[item, :, real])


@pytest.mark.parametrize("training", [False, True])
def test_layer_with_attention_of_its_own_is_captured_or_reported(training: bool) -> None:
    class Own(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Own(M, 1, 24, batch_first=True, dropout=0.0, bias=False).train(training)
    x = torch.randn(2, 5, M)
    with torch.no_grad():
        expected = model(x)
        if training:
            with qkv.capture(model) as calls:
                assert torch.equal(model(x), expected)
            assert torch.equal(calls[0].query[:, 0], x)
            return
        with pytest.warns(UserWarning, match="in code of its own"), qkv.capture(model) as calls:
            assert torch.equal(model(x), expected)
    assert (len(calls), [m.layer for m in calls.missed]) == (0, [""])


@pytest.mark.parametrize("kind", ["mask", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_the_fast_path_takes_for_truth_values_are_reported(
    kind: str, dtype: torch.dtype, fast_layers: list[bool]
) -> None:
    model = nn.TransformerEncoderLayer(M, HEADS, 24, batch_first=True, dtype=dtype).eval()
    x = torch.randn(2, 5, M).to(dtype)
    bias = {"src_mask": torch.zeros(5, 5)} if kind == "mask" else {}
    bias = bias or {"src_key_padding_mask": torch.zeros(2, 5)}
    (name,) = bias
    bias[name] = bias[name].to(dtype)
    for number, is_missed in ((-torch.inf, False), (-1.0, True)):
        bias[name][0, 3:] = number
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            expected = model(x, **bias)
            with qkv.capture(model) as calls:
                assert torch.equal(model(x, **bias), expected)
        assert len(calls) == 1 - is_missed
        assert [missed.reason for missed in calls.missed] == [
            "torch's fast path takes the numbers of its mask for truth values"
        ] * is_missed
    assert fast_layers == [False] * 4


@pytest.mark.parametrize("training", [False, True])
def test_decoder_is_captured(training: bool) -> None:
    layer = nn.TransformerDecoderLayer(M, HEADS, 24, batch_first=True, dropout=0.1)
    model = nn.TransformerDecoder(layer, 2).train(training)
    x, memory = torch.randn(2, 4, M), torch.randn(2, 6, M)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    state = state_of(model)

    def run() -> Tensor:
        torch.manual_seed(1)
        output: Tensor = model(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return output

    expected = run()
    with qkv.capture(model) as calls:
        assert torch.equal(run(), expected)
    names = [f"layers.{n}.{a}" for n in range(2) for a in ("self_attn", "multihead_attn")]
    assert [call.layer for call in calls] == names
    assert [call.key.shape[2] for call in calls] == [4, 6, 4, 6]
    assert state_of(model) == state


def test_other_modes_of_torch_functions_stay_on() -> None:
    """A mode inside the model stays on while a fast path is tried."""
    seen: list[Any] = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = build_encoder()

        def forward(self, x: Tensor) -> Tensor:
            with Names():
                return self.encoder(x)  # type: ignore[no-any-return]

    model, x = Model().eval(), torch.randn(2, 5, M)
    with torch.no_grad():
        expected = model(x)
        count = len(seen)
        with qkv.capture(model) as calls:
            assert torch.equal(model(x), expected)
    assert len(seen) >= 2 * count
    assert len(calls) == 2
    # torch has no public list of its modes
    assert not torch.overrides._get_current_function_mode_stack()
