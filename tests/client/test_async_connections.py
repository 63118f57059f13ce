"""Requests of an `AsyncClient` at the same time: each has a connection that no other uses."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from qkv import AsyncClient
from qkv.client import async_connections
from support.clients import numbers
from support.service import Server


async def _attend(client: AsyncClient, seed: int) -> Any:
    arrays = {n: a + seed for n, a in numbers().items()}
    return (await client.attend("softmax", **arrays, weights="none")).output


def test_each_of_many_tasks_gets_its_own_response(server: Server) -> None:
    async def run() -> list[Any]:
        async with AsyncClient(server.url) as client:
            together = await asyncio.gather(*[_attend(client, seed) for seed in range(40)])
            for seed, output in enumerate(together):
                assert np.array_equal(output, await _attend(client, seed))
            assert client._connections is not None
            return client._connections._idle

    assert len(asyncio.run(run())) == 0  # closed


def test_one_task_uses_one_connection(server: Server) -> None:
    async def run() -> tuple[int, int]:
        async with AsyncClient(server.url) as client:
            for seed in range(5):
                await _attend(client, seed)
            assert client._connections is not None
            (http,) = client._connections._idle
            (connection,) = http._transport._pool.connections  # type: ignore[attr-defined]
            return len(client._connections._idle), connection._connection._request_count

    assert asyncio.run(run()) == (1, 5)


def test_few_idle_connections_stay_open(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_connections, "_MAX_IDLE", 3)

    async def run() -> int:
        async with AsyncClient(server.url) as client:
            await asyncio.gather(*[_attend(client, seed) for seed in range(8)])
            assert client._connections is not None
            return len(client._connections._idle)

    assert asyncio.run(run()) == 3


def test_request_that_waits_too_long_for_a_connection_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_connections, "_MAX_CONNECTIONS", 1)

    async def run() -> None:
        async with AsyncClient(server.url, timeout=0.3) as client:
            with server.hold():
                first = asyncio.create_task(
                    client.attend("softmax", **_large_arrays(), weights="none")
                )
                await asyncio.sleep(0)
                with pytest.raises(httpx.PoolTimeout, match="all connections are in use"):
                    await _attend(client, 1)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await _attend(client, 1)

    asyncio.run(run())


def test_cancelled_request_frees_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_connections, "_MAX_CONNECTIONS", 1)

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            for _ in range(3):
                task = asyncio.create_task(_attend(client, 1))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert np.isfinite(await _attend(client, 2)).all()

    asyncio.run(run())


def _large_arrays() -> dict[str, Any]:
    """Returns inputs of a job that is queued, not run on the event loop."""
    shape = (1, 8, 512, 64)
    return {name: np.ones(shape, np.float32) for name in ("query", "key", "value")}
