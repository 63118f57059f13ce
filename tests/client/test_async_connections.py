"""Requests of an `AsyncClient` at the same time: each has a connection that no other uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv import AsyncClient
from support.clients import numbers
from support.processes import TIMEOUT_S, wait_until
from support.service import Server

CONNECTIONS: Final = 100
"""As many as httpx opens by default."""
Serve = Callable[..., Server]


async def _attend(client: AsyncClient, seed: int) -> Any:
    arrays = {n: a + seed for n, a in numbers().items()}
    return (await client.attend("softmax", **arrays, weights="none")).output


def _ports(server: Server) -> set[int]:
    """Returns the port of the client's end of each open connection."""
    return {port for _, port in server.clients}


def test_each_of_many_tasks_gets_its_own_response(serve: Serve) -> None:
    server = serve()

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            together = await asyncio.gather(*[_attend(client, seed) for seed in range(40)])
            for seed, output in enumerate(together):
                assert np.array_equal(output, await _attend(client, seed))
            assert _ports(server)

    asyncio.run(run())
    wait_until(lambda: not _ports(server))  # closed


def test_one_task_uses_one_connection(serve: Serve) -> None:
    server = serve()

    async def run() -> None:
        used: set[int] = set()
        async with AsyncClient(server.url) as client:
            for seed in range(5):
                await _attend(client, seed)
                used |= _ports(server)
        assert len(used) == 1

    asyncio.run(run())


def test_few_idle_connections_stay_open(serve: Serve) -> None:
    server = serve()

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            with server.hold():
                tasks = [asyncio.create_task(_attend(client, seed)) for seed in range(30)]
                await asyncio.to_thread(server.wait_until_queued, 30)
                assert len(_ports(server)) == 30
            await asyncio.gather(*tasks)
            await asyncio.to_thread(wait_until, lambda: len(_ports(server)) == 20)

    asyncio.run(run())


def test_request_that_waits_too_long_for_a_connection_fails(server: Server) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, timeout=0.5) as client:
            with server.hold():
                first = [asyncio.create_task(_attend(client, 1)) for _ in range(CONNECTIONS)]
                await asyncio.sleep(0)
                with pytest.raises(httpx.PoolTimeout, match="all connections are in use"):
                    await _attend(client, 1)
            await asyncio.gather(*first, return_exceptions=True)
            await _attend(client, 1)

    asyncio.run(run())


def test_cancelled_request_frees_its_connection(server: Server) -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            for _ in range(2):
                tasks = [asyncio.create_task(_attend(client, 1)) for _ in range(CONNECTIONS)]
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(TIMEOUT_S):
                assert np.isfinite(await _attend(client, 2)).all()

    asyncio.run(run())
