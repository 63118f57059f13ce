"""A request cycle: the head of its response, and the disconnect of its client."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from fastapi import Request

from qkv.api.job_runner import DISCONNECT_STATE, cancel_on_disconnect
from qkv.errors import ClientDisconnected
from qkv.server.request_cycle import RequestCycle, encode_head


def test_head_has_a_line_for_each_header() -> None:
    headers = [(b"content-length", b"2"), (b"x-request-id", b"a")]
    expected = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: a\r\n\r\n"
    assert encode_head(200, headers) == expected


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"\r\n"])
def test_header_with_a_line_break_is_not_sent(value: bytes) -> None:
    for header in ((b"x-request-id", value), (value, b"a")):
        with pytest.raises(RuntimeError, match="Invalid HTTP header"):
            encode_head(200, [header])


def new_cycle() -> RequestCycle:
    return RequestCycle(
        {"type": "http"},
        Mock(),
        Mock(),
        [],
        keep_alive=True,
        is_last=lambda: False,
        expects_continue=False,
        on_response=Mock(),
        close=Mock(),
    )


def test_disconnect_is_called_back_once() -> None:
    cycle, callback = new_cycle(), Mock()
    cycle.call_on_disconnect(callback)
    for _ in range(2):
        cycle.disconnect()
    callback.assert_called_once()
    late = Mock()
    cycle.call_on_disconnect(late)
    late.assert_called_once()


def test_withdrawn_callback_is_not_called() -> None:
    cycle, callback = new_cycle(), Mock()
    cycle.call_on_disconnect(callback)
    cycle.call_on_disconnect(None)
    cycle.disconnect()
    callback.assert_not_called()


@pytest.mark.parametrize("is_early", [True, False])
def test_disconnect_cancels_the_future_of_a_request(is_early: bool) -> None:
    async def test() -> None:
        cycle = new_cycle()
        request = Request({"type": "http", "state": {DISCONNECT_STATE: cycle}})
        future = asyncio.get_running_loop().create_future()
        if is_early:
            cycle.disconnect()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        await asyncio.sleep(0)
        cycle.disconnect()
        with pytest.raises(ClientDisconnected):
            await waiting
        assert future.cancelled()

    asyncio.run(test())


def test_cancelled_request_cancels_its_future_and_stays_cancelled() -> None:
    async def test() -> None:
        cycle = new_cycle()
        request = Request({"type": "http", "state": {DISCONNECT_STATE: cycle}})
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert future.cancelled()

    asyncio.run(test())
