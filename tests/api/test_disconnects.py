"""Clients that disconnect while their request waits: its job is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from qkv.api.job_runner import cancel_on_disconnect
from qkv.errors import ClientDisconnected


def new_request(*, is_gone: bool = False) -> tuple[Request, asyncio.Event]:
    """Returns a request, and the event of its disconnect."""
    gone, has_body = asyncio.Event(), True

    async def receive() -> Any:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    if is_gone:
        gone.set()
    return Request({"type": "http", "method": "POST", "headers": []}, receive), gone


@pytest.mark.parametrize("is_gone", [True, False])
def test_disconnect_cancels_the_future_of_a_request(is_gone: bool) -> None:
    async def test() -> None:
        request, gone = new_request(is_gone=is_gone)
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        await asyncio.sleep(0)
        gone.set()
        with pytest.raises(ClientDisconnected):
            await waiting
        assert future.cancelled()

    asyncio.run(test())


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_cancelled_request_cancels_its_future_and_stays_cancelled(turns: int) -> None:
    async def test() -> None:
        request, _ = new_request()
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not turns or future.cancelled()  # before its first turn it has run nothing

    asyncio.run(test())


def test_result_ends_the_watch_of_the_client() -> None:
    async def test() -> None:
        request, _ = new_request()
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        for _ in range(3):
            await asyncio.sleep(0)
        future.set_result(3)
        assert await waiting == 3
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(test())
