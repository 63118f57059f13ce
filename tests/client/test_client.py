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
from qkv import Client
from support.clients import ROLES, ask, in_asyncio, numbers
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
    state = {f"W_{role}.weight": torch.ones(6, 5) for role in ROLES}
    converted = client.convert(state, source="v2", target="v1")
    assert repr(converted).startswith("Converted(W_query: float32 (5, 6), ")
    for result in (run, gradients, comparison, converted):
        assert len(repr(result)) < 250
        assert "\n" not in repr(result)
