"""Tests of the clients on whole state dicts: what is sent, what is left out, what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from qkv import Client, errors
from qkv.client.layer_tensors import select
from qkv.client.request_builders import build_attend, build_convert
from qkv.wire import safetensors
from support.checkpoints import gpt2, llama, v1_of_llama
from support.clients import client as client
from support.clients import in_asyncio
from support.service import Server

PREFIX = "model.layers.3.self_attn"


def with_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """Adds buffers, such as old checkpoints have."""
    masks = {f"{PREFIX}.mask": torch.ones(4, 4).bool(), f"{PREFIX}.ids": torch.arange(4)}
    return state | masks | {f"{PREFIX}.bytes": torch.ones(4, dtype=torch.uint8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_convert_takes_the_state_dict_of_a_whole_model(
    client: Client, server: Server, dtype: torch.dtype
) -> None:
    state = with_buffers(llama(dtype).state_dict())
    converted = client.convert(state, target="v1", prefix=PREFIX, heads=4)
    expected = v1_of_llama(state, PREFIX)
    assert converted.tensors.keys() == expected.keys()
    assert all(torch.equal(converted.tensors[n], t) for n, t in expected.items())
    assert (converted.source, converted.prefix) == ("llama", PREFIX)
    assert (converted.ignored, converted.rotary_order) == ((), "half")
    assert converted.check["largest_absolute_difference"] < 1e-12
    same = in_asyncio(server.url, lambda c: c.convert(state, target="v1", prefix=PREFIX, heads=4))
    assert all(torch.equal(same.tensors[n], t) for n, t in expected.items())
    assert (same.source, same.prefix) == ("llama", PREFIX)


def test_every_argument_reaches_the_service(client: Client) -> None:
    state = llama().state_dict()
    full = client.convert(state, target="mha", prefix=PREFIX, heads=4, kv_heads=2, grouped="repeat")
    key = state[f"{PREFIX}.k_proj.weight"].view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    assert torch.equal(full.tensors["in_proj_weight"][32:64], key)
    turned = client.convert(state, target="llama", prefix=PREFIX, heads=4, to_order="interleaved")
    assert turned.rotary_order == "interleaved"
    back = client.convert(turned.tensors, target="llama", heads=4, rope={"order": "interleaved"})
    assert torch.equal(back.tensors["q_proj.weight"], state[f"{PREFIX}.q_proj.weight"])
    assert back.rotary_order == "half"


@pytest.mark.parametrize("target", ["v1", "meta", "phi3"])
def test_converted_layer_runs_as_the_layer_of_the_model(client: Client, target: str) -> None:
    state = llama().state_dict()
    source = {"layout": "auto", "prefix": PREFIX, "heads": 4, "rope": {"base": 500.0}}
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = client.attend("softmax", x=x, layer=source | {"tensors": state}, causal=True)
    converted = client.convert(state, target=target, prefix=PREFIX, heads=4, rope={"base": 500.0})
    order = {"meta": "interleaved"}.get(target, "half")
    assert converted.layer["rope"] == {"base": 500.0, "order": order}
    run = client.attend("softmax", x=x, layer=converted.layer, causal=True)
    off = (run.output - expected.output).abs().max().item()
    assert off <= 64 * torch.finfo(torch.float32).eps * expected.output.abs().max().item()


def test_converted_layer_without_rope_is_refused_with_the_argument(client: Client) -> None:
    state = llama().state_dict()
    converted = client.convert(state, target="v1", prefix=PREFIX, heads=4)
    with pytest.raises(
        errors.InvalidContent, match="rope is missing: got a conversion of llama"
    ) as error:
        _ = converted.layer
    assert "`convert`" in str(error.value)
    without = {**converted.options, "tensors": converted.tensors}
    assert client.attend("softmax", x=torch.ones(1, 2, 32), layer=without).output.shape[1] == 2
    plain = {n: t for n, t in gpt2().state_dict().items() if ".h.1." in n}
    layer = client.convert(plain, target="v2", heads=4).layer
    assert {n: v for n, v in layer.items() if n != "tensors"} == {
        "layout": "v2", "heads": 4, "kv_heads": 4,
    }  # fmt: skip


def test_rope_without_an_order_turns_half_of_the_channels(client: Client) -> None:
    """v2 names no order, and meta has another one: the rows move."""
    state = client.convert(llama().state_dict(), target="v2", prefix=PREFIX, heads=4).tensors
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    source = {"layout": "v2", "heads": 4, "rope": {}, "tensors": state}
    expected = client.attend("softmax", x=x, layer=source, causal=True)
    converted = client.convert(state, source="v2", target="meta", heads=4, rope={})
    assert converted.rotary_order == "interleaved"
    run = client.attend("softmax", x=x, layer=converted.layer, causal=True)
    assert torch.allclose(run.output, expected.output, rtol=1e-5, atol=1e-7)


def test_numpy_arrays_and_ignored_names(client: Client) -> None:
    state = {n: t.numpy() for n, t in gpt2().state_dict().items()}
    state["transformer.h.1.attn.extra"] = np.ones(3, np.float32)
    converted = client.convert(state, target="v2", prefix="transformer.h.1.attn.")
    assert converted.ignored == ("transformer.h.1.attn.extra",)
    assert type(converted.tensors["W_query.bias"]) is np.ndarray
    weight = state["transformer.h.1.attn.c_attn.weight"]
    assert (converted.tensors["W_key.weight"] == weight[:, 32:64].T).all()


def test_layer_of_a_run_takes_the_state_dict_of_a_whole_model(client: Client) -> None:
    state = with_buffers(llama().state_dict())
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    own = {n.removeprefix(f"{PREFIX}."): t for n, t in state.items() if n.startswith(PREFIX)}
    floating = {n: t for n, t in own.items() if t.is_floating_point()}
    whole = {"layout": "auto", "heads": 4, "prefix": PREFIX, "tensors": state}
    alone = {"layout": "llama", "heads": 4, "tensors": floating}
    runs = [client.attend("softmax", x=x, layer=layer, causal=True) for layer in (whole, alone)]
    assert torch.equal(runs[0].output, runs[1].output)
    grad = torch.ones(1, 5, 32)
    there = client.gradients("softmax", x=x, layer=whole, grad_output=grad)
    here = client.gradients("softmax", x=x, layer=alone, grad_output=grad)
    assert all(torch.equal(there[f"{PREFIX}.{n}"], here[n]) for n in floating)
    assert there.gradients.keys() == {"x", *(f"{PREFIX}.{n}" for n in floating)}
    assert client.compare(["linear"], x=x, layer=whole).variants[0].output


def test_only_the_layer_is_sent() -> None:
    state = with_buffers(llama().state_dict())
    names = {f"{PREFIX}.{r}_proj.weight" for r in "qkvo"}
    spec = build_convert(state, "auto", "v1", prefix=PREFIX)
    message = safetensors.decode(spec.content, "tensors")
    assert message.tensors.keys() == names
    assert message.fields == {"from": "auto", "to": "v1", "prefix": PREFIX}
    layer = {"layout": "auto", "prefix": PREFIX, "tensors": state}
    run = build_attend("softmax", layer, None, None, {"x": torch.ones(1, 2, 32)})
    assert safetensors.decode(run.content, "inputs").layer.keys() == names


def test_gradients_keep_names_that_begin_with_layer(client: Client) -> None:
    draw = np.random.default_rng(0)
    tensors = {f"layer.0.W_{r}": draw.normal(size=(4, 6)) for r in ("query", "key", "value")}
    layer = {"layout": "v1", "prefix": "layer.0", "tensors": tensors}
    found = client.gradients(
        "softmax", x=np.ones((1, 3, 4)), layer=layer, grad_output=np.ones((3, 6))[None]
    )
    assert found.gradients.keys() == {"x", *tensors}


FLOAT8 = ml_dtypes.float8_e4m3fn
MANY = {f"x.{i}": np.ones(1) for i in range(257)}


@pytest.mark.parametrize(
    ("tensors", "prefix", "expected", "pointer"),
    [
        ({"a.W": np.ones(2)}, "b", "got 'b', expected the beginning of 'a.W'", "/prefix"),
        ({"ab.W": np.ones(2)}, "a", "prefix fits no tensor", "/prefix"),
        ({"a.q.weight": np.ones(2, int)}, "a", "a.q.weight has the wrong dtype: got int64",
         "/tensors/a.q.weight"),
        ({"W_query": np.ones(2, int)}, None, "W_query has the wrong dtype", "/tensors/W_query"),
        ({"in_proj_weight": np.ones(2, "u1")}, "", "got uint8", "/tensors/in_proj_weight"),
        ({"weight": np.ones(2, FLOAT8)}, None, "got float8_e4m3fn", "/tensors/weight"),
        ({"weight": torch.ones(2, dtype=torch.float8_e5m2)}, None, "got float8_e5m2",
         "/tensors/weight"),
        (MANY, None, "prefix is missing: got 257 tensors", "/prefix"),
        (MANY, "x", "prefix is too short: got 257", "/prefix"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_sent_are_named(
    tensors: dict[str, Any], prefix: str | None, expected: str, pointer: str
) -> None:
    for at in ("", "/layer"):
        with pytest.raises(errors.InvalidContent) as caught:
            select(tensors, prefix, at)
        assert expected in caught.value.detail
        assert caught.value.pointer == at + pointer


def test_buffers_are_left_out() -> None:
    arrays: dict[str, Any] = {
        "a.bias": np.ones((1, 1, 2, 2), bool), "a.ids": np.arange(3), "a.bytes": np.ones(2, "u1"),
        "a.float8": torch.ones(2).to(torch.float8_e5m2), "a.q": torch.ones(2).bfloat16(),
    }  # fmt: skip
    assert select(arrays, "a").keys() == {"a.q"}
    assert select(arrays, None).keys() == {"a.q"}
