"""Tests of the client's exceptions: rejected requests, missing services, other servers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from qkv import Client, QkvError, ServiceUnreachable, errors
from support.clients import attend, in_asyncio, numbers, send_sync
from support.clients import client as client
from support.processes import TIMEOUT_S
from support.service import Server


@pytest.mark.parametrize(
    ("call", "kind", "expected", "pointer"),
    [
        (attend(variant="sofmax"), errors.NotFound, "softmax", None),
        (attend(variant="a/b?c#d"), errors.NotFound, "a/b", None),
        (attend(layer="name"), errors.InvalidContent, "layer", "/layer/name"),
        (attend(causal="yes"), errors.InvalidContent, "causal", "/parameters/causal"),
        (attend(nothing=1), errors.InvalidContent, "nothing", "/parameters/nothing"),
        (attend(nothing=np.ones(3)), errors.InvalidContent, "nothing", "/inputs/nothing"),
        (attend(key=np.ones((2, 2, 5, 7), "f4")), errors.InvalidContent, "D=7", "/inputs/key"),
        (attend(key=np.ones((2, 2, 5, 8))), errors.InvalidContent, "float64", "/inputs/key"),
        (attend(outputs=["all"]), errors.InvalidContent, "all", "/outputs/0"),
        (attend(weights="some"), errors.InvalidContent, "some", "/weights"),
        (attend(layer={"layout": "v9"}), errors.InvalidContent, "v9", "/layer/layout"),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v2"),
            errors.InvalidContent, "W_key", "/tensors",
        ),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v7"),
            errors.InvalidContent, "v7", "/to",
        ),
        (
            lambda c: c.convert({}, source="v1", target="v2"),
            errors.InvalidContent, "nothing", "/tensors",
        ),
    ],
)  # fmt: skip
def test_rejected_request_raises_its_error(
    client: Client,
    call: Callable[[Client], object],
    kind: type[QkvError],
    expected: str,
    pointer: str | None,
) -> None:
    with pytest.raises(QkvError) as caught:
        call(client)
    assert type(caught.value) is kind
    assert expected in caught.value.detail
    assert str(caught.value) == caught.value.detail
    assert caught.value.pointer == pointer
    assert caught.value.problem()["status"] == kind.status


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"query": np.ones((2, 2), "c8"), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": np.array([["a"]]), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": np.array([None]), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": torch.ones(2, 2, dtype=torch.int32), "key": np.ones((2, 2))},
        {"query": np.ones((2, 2)), "key": torch.ones(2, 2, dtype=torch.complex64)},
    ],
)
def test_invalid_arrays_are_errors_without_a_request(
    client: Client, arguments: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidContent):
        client.attend("softmax", **arguments)


@pytest.mark.slow
def test_limits_of_the_service_raise_their_errors(serve: Callable[..., Server]) -> None:
    inputs = numbers()
    small = serve(max_body_bytes=1000)
    with Client(small.url) as client:
        with pytest.raises(errors.PayloadTooLarge) as too_large:
            client.attend("softmax", **inputs)
        assert too_large.value.members == {"limit": 1000}
    busy = serve(max_queue_bytes=3000)
    with ThreadPoolExecutor(1) as pool, Client(busy.url, timeout=TIMEOUT_S) as client:
        with busy.hold():
            waiting = pool.submit(client.attend, "softmax", **inputs)
            busy.wait_until_queued(1)
            with pytest.raises(errors.ServiceUnavailable) as not_now:
                client.attend("softmax", **inputs)
            assert not_now.value.retry_after >= 1
        assert waiting.result().output.shape == (2, 4, 3, 6)


@pytest.mark.parametrize("send", [send_sync, in_asyncio])
def test_missing_service_is_an_error_with_address_and_hint(send: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    calls: list[Callable[[Any], Any]] = [
        lambda client: client.attend("softmax", **numbers()),
        lambda client: client.variants(),
    ]
    for call in calls:
        with pytest.raises(ServiceUnreachable) as caught:
            send(url.replace("//", "//user:secret@"), call, retries=1)
        assert caught.value.url == url
        assert str(caught.value).startswith(f"no service at {url}: ")
        assert "`qkv serve`" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert isinstance(caught.value, httpx.ConnectError)
        assert caught.value.__cause__ is not None


def test_timeout_is_an_error_of_httpx(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(server.url, timeout=0.05) as client, server.hold():
        with pytest.raises(httpx.TimeoutException):
            client.attend("softmax", **numbers())
        server.wait_until_queued(0)  # the service drops the request of the closed connection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (502, {"content-type": "text/html"}, b"<h1>Bad gateway</h1>"),
        (502, {"content-type": "application/json"}, b"[]"),
        (502, {"content-type": "application/json"}, b'"bad gateway"'),
        (500, {}, b""),
        (404, {"content-type": "application/json"}, b'{"detail": "Not Found"}'),
        (
            503,
            {
                "content-type": "application/problem+json",
                "retry-after": "Wed, 21 Oct 2015 07:28:00 GMT",
            },
            b'{"type": "urn:qkv:problem:service-unavailable", "detail": "busy"}',
        ),
        (200, {}, b"<h1>Welcome</h1>"),
        (200, {"content-type": "application/json"}, b"{}"),
        (200, {"content-type": "application/json"}, b"[]"),
    ],
)
def test_response_of_another_server_is_a_qkv_error(
    status: int, headers: dict[str, str], content: bytes
) -> None:
    """The server may be a proxy or any other HTTP server."""

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=content)

    transport = httpx.MockTransport(respond)
    with Client("http://elsewhere", transport=transport, retries=0) as client:
        for call in (
            lambda: client.attend("softmax", **numbers()),
            lambda: client.convert({"W": np.ones(2)}, source="v1", target="v2"),
            client.variants,
        ):
            with pytest.raises(QkvError):
                call()
