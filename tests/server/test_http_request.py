"""A request on a connection: the head of its response, and the disconnect of its client."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import Request

from qkv.api.job_runner import cancel_on_disconnect
from qkv.api.server_request import SERVER_REQUEST
from qkv.errors import ClientDisconnected
from qkv.server.http_request import HttpRequest, encode_head


def test_head_has_a_line_for_each_header() -> None:
    headers = [(b"content-length", b"2"), (b"x-request-id", b"a")]
    expected = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: a\r\n\r\n"
    assert encode_head(200, headers) == expected


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"\r\n"])
def test_header_with_a_line_break_is_not_sent(value: bytes) -> None:
    for header in ((b"x-request-id", value), (value, b"a")):
        with pytest.raises(RuntimeError, match="a header has a line break"):
            encode_head(200, [header])


def new_request() -> tuple[HttpRequest, Request]:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
    scope[SERVER_REQUEST] = request = HttpRequest(Mock(), scope, keep_alive=True)
    return request, Request(scope)


def test_disconnect_is_called_back_once() -> None:
    (http_request, _), callback = new_request(), Mock()
    http_request.call_on_disconnect(callback)
    for _ in range(2):
        http_request.disconnect()
    callback.assert_called_once()
    late = Mock()
    http_request.call_on_disconnect(late)
    late.assert_called_once()


def test_withdrawn_callback_is_not_called() -> None:
    (http_request, _), callback = new_request(), Mock()
    http_request.call_on_disconnect(callback)
    http_request.call_on_disconnect(None)
    http_request.disconnect()
    callback.assert_not_called()


@pytest.mark.parametrize("is_early", [True, False])
def test_disconnect_cancels_the_future_of_a_request(is_early: bool) -> None:
    async def test() -> None:
        http_request, request = new_request()
        future = asyncio.get_running_loop().create_future()
        if is_early:
            http_request.disconnect()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        await asyncio.sleep(0)
        http_request.disconnect()
        with pytest.raises(ClientDisconnected):
            await waiting
        assert future.cancelled()

    asyncio.run(test())


def test_cancelled_request_cancels_its_future_and_stays_cancelled() -> None:
    async def test() -> None:
        _, request = new_request()
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(cancel_on_disconnect(request, future))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert future.cancelled()

    asyncio.run(test())
