"""Tests of what `qkv.capture` cannot see: it is reported by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.models.calls import Calls
from qkv.models.capture import CaptureWarning
from support.captured_models import HEADS, WIDTH, PlainAttention, missed_layers
from support.small_modules import NanoGPT

F = nn.functional


@contextmanager
def captured_with_a_warning(model: nn.Module, **options: Any) -> Iterator[Calls]:
    """Captures a model; the warning at the end must name each missed layer."""
    with pytest.warns(CaptureWarning) as caught, qkv.capture(model, **options) as calls:
        yield calls
    (warning,) = (w for w in caught if w.category is CaptureWarning)
    assert warning.filename.endswith("contextlib.py") or warning.filename == __file__
    for missed in calls.missed:
        assert f"{missed.layer or 'the model'}: {missed.reason}" in str(warning.message)


def x() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """Returns torch.compile with the plain backend, which needs no C++ compiler."""
    torch.compiler.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        yield lambda model: torch.compile(model, backend="eager", fullgraph=True)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_model_is_reported(compiled: Callable[..., Any]) -> None:
    model = compiled(nn.Sequential(PlainAttention()))
    expected = model(x())
    with captured_with_a_warning(model) as calls:
        assert torch.equal(model(x()), expected)
    assert missed_layers(calls) == [""]
    assert "compiled graph" in calls.missed[0].reason


@pytest.mark.slow
def test_compiled_submodules_are_reported(compiled: Callable[..., Any]) -> None:
    model = nn.Sequential(*(PlainAttention() for _ in range(4)))
    model[1] = compiled(model[1])
    model[2].compile(backend="eager")
    model[3].forward = compiled(model[3].forward)
    expected = model(x())
    with captured_with_a_warning(model) as calls:
        assert torch.equal(model(x()), expected)
    assert calls.layers == ["0"]
    assert missed_layers(calls) == ["1", "2", "3"]


@pytest.mark.slow
def test_model_that_runs_through_its_compiled_twin_is_reported(
    compiled: Callable[..., Any],
) -> None:
    model = nn.Sequential(PlainAttention(), nn.Linear(WIDTH, WIDTH))
    twin = compiled(model)
    expected = twin(x())
    for _ in range(2):
        with captured_with_a_warning(model) as calls:
            assert torch.equal(twin(x()), expected)
        assert missed_layers(calls) == [""]
    assert torch.equal(twin(x()), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_reported() -> None:
    model = nn.Sequential(torch.jit.trace(PlainAttention(), x()), PlainAttention())
    with captured_with_a_warning(model) as calls:
        model(x())
    assert (missed_layers(calls), calls.layers) == (["0"], ["1"])
    assert "TorchScript" in calls.missed[0].reason


def test_data_parallel_is_reported() -> None:
    model = nn.DataParallel(PlainAttention())
    with captured_with_a_warning(model) as calls:
        model(x())
    assert missed_layers(calls) == [""]
    assert "`module`" in calls.missed[0].reason


def test_hand_written_attention_is_reported_once() -> None:
    model = NanoGPT(WIDTH, HEADS, 8, True)
    with captured_with_a_warning(model) as calls:
        for block in [*model.transformer["h"], *model.transformer["h"]]:  # type: ignore[misc]
            block["attn"](x())
    assert missed_layers(calls) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert "code of its own" in calls.missed[0].reason


def test_function_of_multihead_attention_is_reported() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            m = self.mha
            return F.multi_head_attention_forward(
                x, x, x, WIDTH, HEADS, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0,
                m.out_proj.weight, m.out_proj.bias,
            )[0]  # fmt: skip

    model = nn.Sequential(Pool())
    with captured_with_a_warning(model) as calls:
        model(x())
    assert missed_layers(calls) == ["0"]
    assert "multi_head_attention_forward" in calls.missed[0].reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_reported() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (
            torch.nested.as_nested_tensor(list(t.repeat_interleave(4 // t.shape[1], 1)))
            for t in (query, key, value)
        )
        return F.scaled_dot_product_attention(query, key, value).to_padded_tensor(0.0)

    model = nn.Sequential(PlainAttention(attend))
    with captured_with_a_warning(model) as calls:
        model(x())
    assert missed_layers(calls) == ["0"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", ["meta", "vmap", "grad"])
def test_tensors_without_numbers_are_reported(way: str) -> None:
    model = nn.Sequential(PlainAttention())
    with captured_with_a_warning(model) as calls:
        if way == "meta":
            model.to("meta")(x().to("meta"))
        elif way == "vmap":
            torch.func.vmap(model)(x()[:, None])
        else:
            torch.func.grad(lambda t: model(t).sum())(x())
    assert missed_layers(calls) == ["0"]


def test_paged_and_unknown_attention_is_reported() -> None:
    import transformers
    from transformers.modeling_utils import AttentionInterface

    def attend(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        return v.transpose(1, 2), None

    AttentionInterface.register("qkv_test", attend)
    try:
        model = transformers.ViTModel(
            transformers.ViTConfig(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, image_size=8,
                patch_size=4, num_attention_heads=2, attn_implementation="qkv_test",
            )
        ).eval()  # fmt: skip
        with captured_with_a_warning(model) as calls:
            model(torch.randn(1, 3, 8, 8))
    finally:
        AttentionInterface._global_mapping.pop("qkv_test")  # nothing public unregisters it
    assert missed_layers(calls) == ["layers.0.attention"]
    assert "'qkv_test' is unknown" in calls.missed[0].reason
