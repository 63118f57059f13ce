"""Tests of `qkv.capture` on ten families of transformers: bits, calls, and what it leaves."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from support import minilm
from support.captured_models import (
    CASES,
    FAMILIES,
    LENGTH,
    PlainAttention,
    assert_repeats,
    assert_same_bits,
    build,
    run_model,
    state_of,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _flex_attention_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs flex attention as plain code: to compile it takes a minute."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from transformers import masking_utils
    from transformers.integrations import flex_attention as module

    plain: Any = flex_attention

    def attend(*tensors: Tensor, training: bool, **options: Any) -> Any:
        return plain(*tensors, **options)

    def build_mask(*arguments: Any, _compile: bool = False, **options: Any) -> Any:
        return create_block_mask(*arguments, **options)

    monkeypatch.setattr(module, "compile_friendly_flex_attention", attend)
    monkeypatch.setattr(masking_utils, "create_block_mask", build_mask)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[1] == "flex_attention" else [])
        for case in CASES
    ],
)
def test_model_of_a_family_is_captured_with_its_bits(name: str, implementation: str) -> None:
    family, model = FAMILIES[name], build(name, implementation)
    batch, state = family.batch(), state_of(model)
    before = run_model(model, batch)
    with qkv.capture(model) as calls:
        during = run_model(model, batch)
    assert_same_bits(during, before)
    assert_same_bits(run_model(model, batch), before)
    assert state_of(model) == state
    assert calls.missed == []
    assert [call.layer for call in calls] == list(family.layers) == calls.layers
    H, G = family.heads
    for index, (call, (L, S)) in enumerate(zip(calls, family.lengths, strict=True)):
        assert (call.index, call.heads, call.items) == (index, tuple(range(H)), (0, 1))
        assert call.query.shape[:3] == call.output.shape[:3] == (2, H, L)
        assert call.key.shape[:3] == call.value.shape[:3] == (2, G, S)
        assert_repeats(call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "implementation"), [c for c in CASES if c[1] != "flex_attention"])
def test_model_of_16_bits_is_captured_in_its_dtype(
    name: str, implementation: str, dtype: torch.dtype
) -> None:
    model, batch = build(name, implementation, dtype), FAMILIES[name].batch(dtype)
    before = run_model(model, batch)
    with qkv.capture(model) as calls:
        assert_same_bits(run_model(model, batch), before)
    assert calls.layers == list(FAMILIES[name].layers)
    for call in calls:
        assert {call.query.dtype, call.key.dtype, call.value.dtype, call.output.dtype} == {dtype}
        assert_repeats(call)


def test_mask_scale_and_softcap_show_in_the_output() -> None:
    """Without them the output differs, so that the other tests prove that they are recorded."""
    model = build("gemma2", "eager")
    with qkv.capture(model) as calls:
        run_model(model, FAMILIES["gemma2"].batch())
    call = calls[0]
    assert (call.softcap, call.scale) == (0.5, 5**-0.5)
    assert call.mask is not None
    for wrong in ({"softcap": None}, {"scale": 1.0}, {"mask": None}):
        run_of = call.run("softmax", outputs=["output"], **wrong)
        assert float((run_of.output - call.output).abs().max()) > 1e-2


def test_query_and_key_have_their_positions() -> None:
    model = build("llama", "sdpa")
    same = torch.full((1, LENGTH), 7)
    with qkv.capture(model) as calls:
        run_model(model, {"input_ids": same})
    query, key = calls[0].query[0, 0], calls[0].key[0, 0]
    assert not torch.allclose(query[0], query[1])
    norms = query.norm(dim=-1)  # a rotation keeps it
    torch.testing.assert_close(norms, norms[:1].expand(LENGTH))
    scores = query @ key.T  # depend on the distance alone
    torch.testing.assert_close(scores[2, 1], scores[5, 4])


def test_trained_model_has_the_queries_that_hooks_see() -> None:
    known = minilm.activations()[:6]
    model, tokenizer = minilm.load()
    with qkv.capture(model) as calls, torch.no_grad():
        model(**tokenizer(known[0].sentence, return_tensors="pt"))
    for call, expected in zip(calls, known, strict=True):
        assert torch.equal(call.query, expected.query_BHLD)
        assert torch.equal(call.key, expected.key_BGSD)
        assert torch.equal(call.value, expected.value_BGSE)
        assert torch.equal(call.output, expected.context_BHLE)
        assert_repeats(call)


def test_nothing_is_left_after_an_exception_in_the_block() -> None:
    from transformers.modeling_utils import AttentionInterface

    model, get_interface = build("bert", "sdpa"), AttentionInterface.get_interface
    state = state_of(model)
    with pytest.raises(KeyError), qkv.capture(model):
        raise KeyError
    assert state_of(model) == state
    assert AttentionInterface.get_interface is get_interface


def test_nothing_is_left_after_an_exception_in_the_model() -> None:
    def fail(*_: Tensor) -> Tensor:
        raise ValueError("attend")

    model = nn.Sequential(PlainAttention(), PlainAttention(fail))
    state, x = state_of(model), torch.randn(2, 5, 16)
    with qkv.capture(model) as calls:
        with pytest.raises(ValueError, match="attend"):
            model(x)
        model[0](x)
    assert state_of(model) == state
    assert calls.layers == ["0"]
    assert len(calls) == 2
    # torch has no public list of its modes
    assert not torch.overrides._get_current_function_mode_stack()


def test_error_while_a_capture_starts_leaves_nothing() -> None:
    """An error while the wrappers are put on takes off those that are on."""
    from transformers.modeling_utils import AttentionInterface

    class Closed(nn.Module):
        @property
        def forward(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no forward")

    model = nn.Sequential(PlainAttention(), Closed())
    state, get_interface = state_of(model), AttentionInterface.get_interface
    with pytest.raises(RuntimeError, match="no forward"), qkv.capture(model):
        pass
    assert state_of(model) == state
    assert AttentionInterface.get_interface is get_interface


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_captures_left_in_any_order_leave_nothing(order: tuple[int, int]) -> None:
    model = nn.Sequential(PlainAttention())
    state, x = state_of(model), torch.randn(2, 5, 16)
    contexts = [qkv.capture(model), qkv.capture(model)]
    found = [context.__enter__() for context in contexts]
    model(x)
    first, second = order
    contexts[first].__exit__(None, None, None)
    model(x)
    contexts[second].__exit__(None, None, None)
    assert (len(found[first]), len(found[second])) == (1, 2)
    assert state_of(model) == state


def test_forward_of_an_instance_stays_and_is_called() -> None:
    """Libraries such as accelerate put a `forward` on the instance."""
    model = nn.Sequential(PlainAttention())
    module, x = model[0], torch.randn(2, 5, 16)
    original, seen = module.forward, []

    def forward(x: Tensor) -> Tensor:
        seen.append(x)
        output: Tensor = original(x)
        return output

    module.forward = forward
    state = state_of(model)
    with qkv.capture(model) as calls:
        model(x)
    assert (len(seen), calls.layers) == (1, ["0"])
    assert state_of(model) == state


def test_shared_module_has_one_name() -> None:
    module = PlainAttention()
    model, x = nn.ModuleDict({"a": module, "b": module}), torch.randn(2, 5, 16)
    with qkv.capture(model) as calls:
        model["b"](x)
    assert calls.layers == ["a"]
    assert "forward" not in module.__dict__


def test_copies_of_a_captured_model_are_not_captured() -> None:
    model, x = nn.Sequential(PlainAttention()), torch.randn(2, 5, 16)
    expected = model(x)
    with qkv.capture(model) as calls:
        during = copy.deepcopy(model)
        stored = io.BytesIO()
        torch.save(model, stored)
        during.load_state_dict({n: torch.zeros_like(p) for n, p in model.state_dict().items()})
        assert torch.equal(during(x), torch.zeros_like(expected))  # it has weights of its own
        assert len(calls) == 0
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    after = copy.deepcopy(model)
    assert torch.equal(loaded(x), expected)
    assert torch.equal(after(x), expected)
    assert "forward" not in after[0].__dict__
