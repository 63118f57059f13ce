"""Tests of the application of a replica, without Ray: a client that disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError

from qkv.server.ray_serve.replica_app import ReplicaApp

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


async def send(message: Any) -> None:
    raise AssertionError(message)


async def never() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("is_receiving", [True, False])
def test_cancellation_is_a_disconnect(is_receiving: bool) -> None:
    received = []

    async def main() -> None:
        waits = asyncio.Event()

        async def app(_: Any, receive: Any, __: Any) -> None:
            waits.set()
            if not is_receiving:
                await asyncio.sleep(0.01)
            received.append(await receive())

        request = asyncio.ensure_future(ReplicaApp(app)(SCOPE, never, send))
        await waits.wait()
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(main())
    assert received == [{"type": "http.disconnect"}]


def test_second_cancellation_ends_the_application() -> None:
    async def main() -> None:
        async def app(*_: Any) -> None:
            await asyncio.Event().wait()

        request = asyncio.ensure_future(ReplicaApp(app)(SCOPE, never, send))
        for _ in range(2):
            await asyncio.sleep(0.01)
            assert not request.done()
            request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_failure_to_receive_is_a_disconnect() -> None:
    received = []

    async def app(_: Any, receive: Any, __: Any) -> None:
        received.append(await receive())

    async def receive() -> Any:
        raise TaskCancelledError

    asyncio.run(ReplicaApp(app)(SCOPE, receive, send))
    assert received == [{"type": "http.disconnect"}]
