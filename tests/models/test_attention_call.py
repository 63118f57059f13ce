"""Tests of a captured call: its weights in any form, and other variants on it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import qkv
from qkv.errors import InvalidContent, NotFound
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from support.attention_calls import make_call, padding_mask
from support.captured_models import FAMILIES, build


def captured(name: str, implementation: str = "eager") -> Calls:
    with qkv.capture(build(name, implementation)) as calls, torch.no_grad():
        build(name, implementation)(**FAMILIES[name].batch())
    return calls


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma2", "t5", "whisper"])
def test_weights_are_those_of_the_model(name: str) -> None:
    """The eager attention of transformers returns its weights."""
    model = build(name, "eager")
    with qkv.capture(model) as calls, torch.no_grad():
        output = model(**FAMILIES[name].batch(), output_attentions=True)
    fields = ("encoder_attentions", "decoder_attentions", "cross_attentions")
    groups = [output[f] for f in fields] if "encoder_attentions" in output else [output.attentions]
    for call, expected in zip(calls, [w for group in groups for w in group], strict=True):
        # scores have as many as D products; weights are at most 1
        bound = 64 * torch.finfo(torch.float32).eps
        assert float((call.weights() - expected).abs().max()) <= bound


def test_forms_of_the_weights_agree() -> None:
    call = captured("llama")[1]
    whole = call.weights()
    assert whole.shape == (2, 4, 6, 6)
    torch.testing.assert_close(call.weights({"rows": [1, 4]}), whole[:, :, [1, 4]])
    assert call.weights({"pool": 3}).shape[:2] == (2, 4)
    assert isinstance(call.weights("stats"), dict)
    top = call.weights({"top_k": 1})
    assert any(torch.allclose(x.float(), whole.amax(-1, keepdim=True)) for x in top.values())


def test_parameters_override_those_of_the_call() -> None:
    call = captured("bert")[0]
    flat = call.weights(scale=0.0)
    seen = (call.weights() > 0).float()
    torch.testing.assert_close(flat, seen / seen.sum(-1, keepdim=True))


def test_variant_without_masks_runs_on_what_is_only_causal() -> None:
    with qkv.capture(build("llama", "eager")) as calls, torch.no_grad():
        build("llama", "eager")(input_ids=FAMILIES["llama"].batch()["input_ids"])
    call = calls[0]
    assert call.mask is not None
    weights = call.weights(variant="linear")
    assert not weights.triu(1).any()
    assert weights[..., 0, 0].all()


@pytest.mark.parametrize("variant", ["linear", "sigmoid"])
def test_padding_at_the_end_changes_no_sequence(variant: str) -> None:
    call = make_call(B=2, L=6, mask=padding_mask([6, 4], 6))
    alone = make_call(L=4)
    alone = replace(alone, **{n: getattr(call, n)[1:, :, :4] for n in ("query", "key", "value")})
    found, expected = call.weights(variant=variant)[1:, :, :4], alone.weights(variant=variant)
    assert not found[..., 4:].any()
    torch.testing.assert_close(found[..., :4], expected)


@pytest.mark.parametrize("variant", ["linear", "sigmoid"])
def test_padding_at_the_start_is_an_error_by_name(variant: str) -> None:
    call = make_call(B=2, L=6, mask=padding_mask([6, 4], 6, left=True))
    with pytest.raises(InvalidContent, match=r"layer\.0 at once, because their padding"):
        call.run(variant)


def test_variant_that_cannot_see_the_mask_is_an_error_by_name() -> None:
    with pytest.raises(InvalidContent, match="linear takes no mask"):
        captured("t5")[0].run("linear")


def test_unknown_variant_is_an_error() -> None:
    with pytest.raises(NotFound, match="nonsense"):
        captured("bert")[0].run("nonsense")


def test_calls_are_a_sequence_by_layer() -> None:
    calls = captured("llama")
    first, second = calls
    assert (calls[0], calls[-1], calls[:1]) == (first, second, [first])
    assert calls.of_layer(second.layer) == [second]
    assert calls.of_layer("nothing") == []
    assert repr(calls) == "Calls(2 calls of 2 layers)"
    assert repr(first) == (
        "AttentionCall('model.layers.0.self_attn', B=2, H=4, L=6, S=6, D=8, float32)"
    )
    assert isinstance(first, AttentionCall)


@pytest.mark.slow
def test_extra_models_is_enough_to_capture() -> None:
    """Blocks every package of the server, and of development, that the extra does not bring."""
    program = """
import importlib.abc, sys
BLOCKED = {
    "fastapi", "starlette", "uvloop", "httptools", "pydantic_settings",
    "fastapi_offline", "opentelemetry", "matplotlib", "transformers", "beartype",
    "prometheus_client", "tritonclient",
}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not in qkv[models]", name=name)
sys.meta_path.insert(0, Block())
import torch, qkv
model = torch.nn.MultiheadAttention(8, 2)
x = torch.randn(3, 8)
with qkv.capture(model) as calls:
    model(x, x, x)
print(calls, tuple(calls[0].weights().shape), tuple(calls[0].run("linear").output.shape))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    expected = "Calls(1 calls of 1 layers) (1, 2, 3, 3) (1, 2, 3, 4)"
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr
