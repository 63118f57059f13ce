"""Tests of the client: outputs, layers, conversions, catalogue, threads, environment."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import qkv
from qkv import Client, Converted
from support.clients import ROLES, Attention, ask, in_asyncio, numbers
from support.clients import client as client
from support.known_requests import random_case
from support.processes import TIMEOUT_S
from support.service import Server


def test_outputs_and_weights_choose_the_returned_arrays(client: Client) -> None:
    inputs = numbers()
    assert list(client.attend("softmax", **inputs).outputs) == ["output", "weights"]
    assert list(client.attend("softmax", **inputs, weights="none").outputs) == ["output"]
    run = client.attend("softmax", **inputs, outputs=["scores"])
    assert list(run.outputs) == ["scores"]
    for name in ("weights", "output"):
        with pytest.raises(KeyError, match=f"{name} is not in the response: got scores, expected"):
            getattr(run, name)
    gradients = client.gradients("softmax", **inputs, grad_output=np.ones((2, 4, 3, 6), "f4"))
    with pytest.raises(KeyError, match="no gradient of mask: got query, key, value"):
        _ = gradients["mask"]
    assert client.attend("softmax", **inputs, scale=None, window=None).timing["flops"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_dict_of_a_module_is_a_layer(client: Client, bias: bool, dtype: torch.dtype) -> None:
    module = Attention(bias).to(dtype)
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = {"layout": "v2", "tensors": module.state_dict()}
    run = client.attend("softmax", x=x, layer=layer, causal=True)
    assert run.output.dtype == dtype
    assert run.output.shape == (2, 4, 6)
    with torch.no_grad():
        q, k, v = (m(x) for m in (module.W_query, module.W_key, module.W_value))
    direct = client.attend("softmax", query=q, key=k, value=v, causal=True)
    # the projections are rounded to the dtype, and sum M = 5 products in some order
    bound = 16 * torch.finfo(dtype).eps * float(v.abs().max()) * (1 + float((q @ k.mT).abs().max()))
    assert float((run.output - direct.output).abs().max()) <= bound
    apart = client.attend("softmax", query=x, key=x, value=x, layer=layer, causal=True)
    assert torch.equal(apart.output, run.output)
    heads = client.attend("softmax", x=x, layer=layer | {"heads": 2})
    assert heads.weights.shape == (2, 2, 4, 4)


def test_converted_weights_convert_back_exactly(client: Client, server: Server) -> None:
    state = {n: t.detach() for n, t in Attention(False).state_dict().items()}
    there = client.convert(state, source="v2", target="v1")
    assert all(type(t) is torch.Tensor for t in there.tensors.values())
    for role in ROLES:
        assert torch.equal(there.tensors[f"W_{role}"], state[f"W_{role}.weight"].T)
    assert there.check["largest_absolute_difference"] < 1e-12
    same = in_asyncio(server.url, lambda c: c.convert(state, source="v2", target="v1"))
    assert type(same) is type(there) is Converted
    assert same.check == there.check
    assert same.tensors.keys() == there.tensors.keys()
    assert all(torch.equal(same.tensors[n], t) for n, t in there.tensors.items())
    back = client.convert(there.tensors, source="v1", target="v2", heads=3)
    assert back.tensors.keys() == state.keys()
    assert all(torch.equal(back.tensors[n], t) for n, t in state.items())
    biased = {n: t.detach().numpy() for n, t in Attention(True).state_dict().items()}
    folded = client.convert(biased, source="v2", target="v1", bias="augment")
    assert all(type(a) is np.ndarray for a in folded.tensors.values())
    again = client.convert(folded.tensors, source="v1", target="v2", bias="augment")
    assert {n: a.tobytes() for n, a in again.tensors.items()} == {
        n: a.tobytes() for n, a in biased.items()
    }
    module = Attention(True).to(torch.bfloat16)
    halves = client.convert(module.state_dict(), source="v2", target="v1", bias="augment")
    assert {t.dtype for t in halves.tensors.values()} == {torch.bfloat16}


def test_catalogue_describes_softmax(client: Client, server: Server) -> None:
    variants = client.variants()
    assert in_asyncio(server.url, lambda c: c.variants()) == variants
    (entry,) = (v for v in variants if v["variant"] == "softmax")
    required, optional = {"query", "key", "value"}, {"mask", "key_lengths", "alibi_slopes", "sinks"}
    assert entry["inputs"].keys() == required | optional
    assert entry["outputs"].keys() == {"output", "weights", "scores"}
    assert entry["parameters"]["properties"]["causal"]["default"] is False


def test_threads_share_a_client(client: Client) -> None:
    cases = [random_case(30_000 + kind, 0) for kind in range(16)]
    alone = [ask(client, case) for case in cases]
    start = threading.Barrier(8, timeout=TIMEOUT_S)

    def run(offset: int) -> list[Any]:
        start.wait()
        runs = [ask(client, case) for case in cases[offset:] + cases[:offset]]
        return runs[len(cases) - offset :] + runs[: len(cases) - offset]

    with ThreadPoolExecutor(8) as pool:
        for runs in pool.map(run, range(0, 16, 2)):
            for one, other in zip(runs, alone, strict=True):
                assert list(one.outputs) == list(other.outputs)
                for name, array in one.outputs.items():
                    assert array.tobytes() == other.outputs[name].tobytes()


def test_public_names_exist_and_are_sorted() -> None:
    assert qkv.__all__ == sorted(qkv.__all__)
    assert {"Client", "QkvError"} <= set(qkv.__all__)
    assert all(hasattr(qkv, name) for name in qkv.__all__)


@pytest.mark.parametrize("kind", [Client, qkv.AsyncClient])
def test_url_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def settings(*arguments: Any, **options: Any) -> tuple[str, str | None]:
        requests: list[httpx.Request] = []

        def respond(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            return httpx.Response(200, json={"variants": []})

        client = kind(*arguments, **options, transport=httpx.MockTransport(respond))
        called = client.variants()
        if asyncio.iscoroutine(called):
            asyncio.run(called)
        (request,) = requests
        url = str(request.url).removesuffix("/v1/variants")
        return url, request.headers.get("authorization")

    assert settings() == ("http://127.0.0.1:8000", None)
    monkeypatch.setenv("QKV_URL", "http://127.0.0.1:9001")
    monkeypatch.setenv("QKV_API_KEY", "of-the-environment")
    assert settings() == ("http://127.0.0.1:9001", "Bearer of-the-environment")
    arguments = settings("http://127.0.0.1:9002", api_key="of-the-argument")
    assert arguments == ("http://127.0.0.1:9002", "Bearer of-the-argument")
    monkeypatch.setenv("QKV_URL", "")
    monkeypatch.setenv("QKV_API_KEY", "")
    assert settings() == ("http://127.0.0.1:8000", None)


def test_client_without_arguments_uses_the_service_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("QKV_URL", server.url)
    with Client() as client:
        assert client.variants()


def test_invalid_key_of_the_environment_is_an_error_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QKV_API_KEY", "secret key")
    with pytest.raises(ValueError, match="API key") as caught:
        Client()
    assert "secret" not in str(caught.value)


def test_repr_of_every_result_is_one_line(client: Client) -> None:
    inputs = numbers()
    run = client.attend("softmax", **inputs)
    assert re.fullmatch(
        r"Run\('softmax', output: float32 \(2, 4, 3, 6\), weights: float32 \(2, 4, 3, 5\), "
        r"total_ms=[\d.e+-]+\)",
        repr(run),
    )
    grad_output = torch.ones(2, 4, 3, 6)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in inputs.items()}
    gradients = client.gradients("softmax", grad_output=grad_output, **tensors)
    assert repr(gradients).startswith("Gradients('softmax', query: float32 (2, 4, 3, 8), key: ")
    comparison = client.compare(["linear"], **inputs)
    assert repr(comparison).startswith("Comparison(anchor='softmax', linear: relative error 0.")
    state = {n: t.detach() for n, t in Attention(False).state_dict().items()}
    converted = client.convert(state, source="v2", target="v1")
    assert repr(converted).startswith("Converted(W_query: float32 (5, 6), ")
    for result in (run, gradients, comparison, converted):
        assert len(repr(result)) < 250
        assert "\n" not in repr(result)
