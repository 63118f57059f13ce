"""Tests that `AsyncClient` has the results and the exceptions of `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from qkv import AsyncClient, Client, Converted, QkvError, Run, errors
from support.clients import Attention, as_numpy, ask, attend, in_asyncio, numbers, same_run, torches
from support.clients import client as client
from support.known_requests import random_case
from support.service import Server


@pytest.mark.parametrize("kind", range(10))
def test_async_client_gives_the_same_bits(client: Client, server: Server, kind: int) -> None:
    case = random_case(50_000 + kind, 0)
    arguments: dict[str, Any] = {"outputs": list(case.outputs)} | case.inputs | case.parameters
    run = in_asyncio(server.url, lambda c: c.attend("softmax", **arguments))
    assert type(run) is Run
    assert same_run(run, client.attend("softmax", **arguments))
    tensors = torches(case.inputs)
    again = in_asyncio(server.url, lambda c: c.attend("softmax", **(arguments | tensors)))
    for name, array in run.outputs.items():
        assert as_numpy(again.outputs[name]).tobytes() == array.tobytes()


def test_async_client_converts_and_reads_the_catalogue(client: Client, server: Server) -> None:
    state = Attention(False).state_dict()
    there = in_asyncio(server.url, lambda c: c.convert(state, source="v2", target="v1"))
    assert type(there) is Converted
    same = client.convert(state, source="v2", target="v1")
    assert there.check == same.check
    assert there.tensors.keys() == same.tensors.keys()
    assert all(torch.equal(there.tensors[n], t) for n, t in same.tensors.items())
    assert in_asyncio(server.url, lambda c: c.variants()) == client.variants()


def test_async_client_runs_many_requests_at_once(client: Client, server: Server) -> None:
    cases = [random_case(60_000 + kind, 0) for kind in range(40)]

    async def all_at_once(client: AsyncClient) -> list[Run]:
        named: list[dict[str, Any]] = [
            {"outputs": list(c.outputs)} | c.inputs | c.parameters for c in cases
        ]
        calls: list[Any] = [client.attend("softmax", **arguments) for arguments in named]
        return list(await asyncio.gather(*calls))

    runs = in_asyncio(server.url, all_at_once)
    assert all(same_run(run, ask(client, c)) for run, c in zip(runs, cases, strict=True))


def test_requests_of_an_async_client_wait_in_parallel(serve: Callable[..., Server]) -> None:
    server = serve()

    async def together(client: AsyncClient) -> list[Run]:
        with server.hold():
            calls = [asyncio.ensure_future(client.attend("softmax", **numbers())) for _ in range(5)]
            await asyncio.to_thread(server.wait_until_queued, 5)
        return list(await asyncio.gather(*calls))

    runs = in_asyncio(server.url, together)
    assert all(same_run(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (attend(variant="sofmax"), errors.NotFound),
        (attend(causal="yes"), errors.InvalidContent),
        (attend(scale=float("nan")), errors.InvalidContent),
        (attend(query=np.ones((2, 2), "c8")), errors.InvalidContent),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v7"),
            errors.InvalidContent,
        ),
    ],
)
def test_async_client_raises_the_same_errors(
    client: Client, server: Server, call: Callable[[Any], Any], kind: type[QkvError]
) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    with pytest.raises(kind) as of_async:
        in_asyncio(server.url, call)
    assert type(of_async.value) is type(caught.value)
    assert of_async.value.problem() == caught.value.problem()


def test_async_client_closes_and_times_out(serve: Callable[..., Server]) -> None:
    server = serve()

    async def closed() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.variants()
        with pytest.raises(RuntimeError, match="closed"):
            await client.variants()
        await client.close()

    asyncio.run(closed())
    with server.hold(), pytest.raises(httpx.TimeoutException):
        in_asyncio(server.url, lambda c: c.attend("softmax", **numbers()), timeout=0.05)
