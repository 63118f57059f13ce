"""Both clients, and inputs for their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qkv import AsyncClient, Client, Run
from support.known_requests import DTYPES, Array, Case, as_json
from support.service import Server

ROLES = ("query", "key", "value")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as shared:
        yield shared


def numbers(dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shapes = {"query": (2, 4, 3, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 6)}
    return {n: draw.normal(size=shape).astype(DTYPES[dtype]) for n, shape in shapes.items()}


def exact_softmax(query: Array, key: Array, value: Array) -> Any:
    """Returns the output of softmax attention in float64, with grouped heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array.astype(float), repeats, 1) for array in (key, value))
    scores = query.astype(float) @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def as_torch(array: Array) -> torch.Tensor:
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torches(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: as_torch(array) for name, array in arrays.items()}


def ask(client: Client, case: Case) -> Run:
    named: dict[str, Any] = case.inputs | case.parameters
    return client.attend("softmax", outputs=list(case.outputs), **named)


def as_numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    array: Array = tensor.numpy()
    return array


def encoded(outputs: Any) -> dict[str, Any]:
    return {name: as_json(array, "base64") for name, array in outputs.items()}


def attend(**changes: Any) -> Callable[[Client], object]:
    arguments: dict[str, Any] = {"variant": "softmax"} | numbers() | changes
    return lambda client: client.attend(**arguments)


def send_sync(url: str, call: Callable[[Client], Any], **options: Any) -> Any:
    """Returns the result of a call of a `Client`, or raises its error."""
    with Client(url, **options) as client:
        return call(client)


def in_asyncio(url: str, call: Callable[[AsyncClient], Any], **options: Any) -> Any:
    """Returns the result of a call of an `AsyncClient`, or raises its error."""

    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            return await call(client)

    return asyncio.run(run())


def same_run(one: Run, other: Run) -> bool:
    seen = [
        [(n, a.dtype, a.shape, a.tobytes()) for n, a in run.outputs.items()] for run in (one, other)
    ]
    return one.variant == other.variant and seen[0] == seen[1]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays between attempts of both clients, which do not wait for them."""
    delays: list[float] = []

    async def sleeps(delay: float) -> None:
        delays.append(delay)

    # only the names in the client: other code sleeps too
    monkeypatch.setattr("qkv.client.client.time", SimpleNamespace(sleep=delays.append))
    monkeypatch.setattr("qkv.client.async_client.asyncio", SimpleNamespace(sleep=sleeps))
    return delays
