"""The clients call httpx's transport directly: what httpx's own `send` does still holds."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

import httpx
import pytest

from qkv import AsyncClient, Client, ServiceUnreachable, errors
from qkv.client.connections import _MAX_TEMPLATES, RequestTemplates
from qkv.client.request_builders import RequestSpec, build_attend
from support.clients import in_asyncio, numbers, send_sync
from support.processes import TIMEOUT_S
from support.scripted_server import drop_connection, json_reply, problem_reply, scripted_server
from support.service import Server

PATH: Final = "/v1/attention/softmax"
Send = Callable[..., Any]


both = pytest.mark.parametrize("send", [send_sync, in_asyncio])


def attend(client: Any) -> Any:
    return client.attend("softmax", **numbers(), weights="none")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_given_transport_is_used(server: Server) -> None:
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(404, json={"type": "urn:qkv:problem:not-found", "detail": "because"})

    with (
        Client("http://nowhere.invalid", transport=httpx.MockTransport(handle)) as client,
        pytest.raises(errors.NotFound, match="because"),
    ):
        attend(client)
    assert [str(request.url) for request in requests] == [f"http://nowhere.invalid{PATH}"]


def test_closed_client_raises(server: Server) -> None:
    with Client(server.url) as client:
        attend(client)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            attend(client)
        client.close()

    async def test() -> None:
        async with AsyncClient(server.url) as client:
            await attend(client)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed"):
                await attend(client)
            await client.close()

    asyncio.run(test())


@both
def test_proxies_of_the_environment_apply(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not to hosts in NO_PROXY."""
    reply = problem_reply(404, "not-found")
    with scripted_server(reply) as proxy, scripted_server(reply) as direct:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with pytest.raises(errors.NotFound):
            send("http://nowhere.invalid", attend)
        assert proxy.paths == [f"http://nowhere.invalid{PATH}"]
        assert proxy.headers[0]["host"] == "nowhere.invalid"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(errors.NotFound):
            send(direct.url, attend)
        assert (len(proxy.paths), direct.paths) == (1, [PATH])


@both
def test_userinfo_in_the_url_becomes_basic_auth(send: Send) -> None:
    """In place of a key, as in httpx; it is in no URL of an error."""
    with scripted_server(problem_reply(404, "not-found")) as received:
        url = received.url.replace("://", "://us%40er:pa:ss@")
        for options in ({}, {"api_key": "key"}):
            with pytest.raises(errors.NotFound):
                send(url, attend, **options)
    expected = "Basic " + base64.b64encode(b"us@er:pa:ss").decode()
    assert [headers["authorization"] for headers in received.headers] == [expected] * 2
    with pytest.raises(ServiceUnreachable) as error:
        send("http://user:secret@127.0.0.1:1", attend, retries=0)
    assert "secret" not in str(error.value)


@both
def test_headers_of_the_httpx_client_are_sent(send: Send) -> None:
    """With those of the request and its own length, each once."""
    with scripted_server(problem_reply(404, "not-found")) as received:
        url = f"{received.url}/below/it"

        def twice(client: Any) -> Any:
            # what httpx adds by itself is too little to tell
            client._http.headers["X-Mine"] = "yes"
            if isinstance(client, Client):
                for _ in range(2):
                    with pytest.raises(errors.NotFound):
                        attend(client)
                return None

            async def both() -> None:
                for _ in range(2):
                    with pytest.raises(errors.NotFound):
                        await attend(client)

            return both()

        send(url, twice, api_key="key")
    body = build_attend("softmax", None, None, "none", numbers()).content
    assert received.bodies == [body] * 2
    assert received.paths == [f"/below/it{PATH}"] * 2
    for headers in received.headers:
        assert headers["authorization"] == "Bearer key"
        assert headers["x-mine"] == "yes"
        assert headers["user-agent"].startswith("python-httpx/")
        assert headers["content-type"] == "application/vnd.safetensors"
        assert headers["content-length"] == str(len(body))
        assert headers["host"] == received.url.removeprefix("http://")
        assert headers["connection"] == "keep-alive"
        assert "accept-encoding" in headers


@both
def test_service_behind_a_prefix_of_a_proxy_is_reached(server: Server, send: Send) -> None:
    """By runs, catalogue and sweeps; without the prefix, the error shows the proxy's response."""

    def forward(handler: BaseHTTPRequestHandler) -> None:
        if not handler.path.startswith("/team/qkv/"):
            json_reply(b"<h1>no such page</h1>", 404, "text/html")(handler)
            return
        names = ("content-type", "accept")
        headers = {n: handler.headers[n] for n in names if n in handler.headers}
        path = handler.path.removeprefix("/team/qkv")
        reply = server.http.request(
            handler.command, path, content=proxy.bodies[-1], headers=headers
        )
        json_reply(reply.content, reply.status_code, reply.headers["content-type"])(handler)

    def sweep(client: Any) -> Any:
        cells = client.sweep(["linear"], [4], progress=False)
        if isinstance(client, Client):
            return [cell.variant for cell in cells]

        async def names() -> list[str]:
            return [cell.variant async for cell in cells]

        return names()

    with scripted_server(forward) as proxy:
        for url in (f"{proxy.url}/team/qkv", f"{proxy.url}/team/qkv/"):
            assert send(url, attend).output.shape == (2, 4, 3, 6)
            assert send(url, lambda client: client.variants())
            assert send(url, sweep) == ["linear"]
        expected = "got HTTP 404, text/html, that begins with '<h1>no such page</h1>'"
        for call in (attend, sweep):
            with pytest.raises(errors.MalformedRequest, match=expected):
                send(f"{proxy.url}/team", call, retries=0)


@both
def test_timeouts_apply(send: Send) -> None:
    """Also those of the connection; a request that timed out is not sent again."""
    stop = threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> None:
        stop.wait(TIMEOUT_S)
        handler.close_connection = True

    with scripted_server(silent) as received:
        try:
            with pytest.raises(httpx.ReadTimeout) as error:
                send(received.url, attend, timeout=0.2)
        finally:
            stop.set()
    assert error.value.request.url.path == PATH
    assert received.paths == [PATH]


@both
def test_errors_have_their_request(send: Send) -> None:
    with (
        scripted_server(drop_connection) as received,
        pytest.raises(httpx.RemoteProtocolError) as e,
    ):
        send(received.url, attend, retries=0)
    assert str(e.value.request.url) == f"{received.url}{PATH}"
    with pytest.raises(ServiceUnreachable) as unreachable:
        send("http://127.0.0.1:1", attend, retries=0)
    cause = unreachable.value.__cause__
    assert isinstance(cause, httpx.ConnectError)
    assert str(cause.request.url) == f"http://127.0.0.1:1{PATH}"
    wrong = json_reply(b"no gzip", content_encoding="gzip")
    with scripted_server(wrong) as received, pytest.raises(httpx.DecodingError) as decoding:
        send(received.url, attend)
    assert str(decoding.value.request.url) == f"{received.url}{PATH}"


def test_connection_is_free_after_a_response_that_cannot_be_decoded() -> None:
    """Even while its error, whose traceback has the response, is kept."""
    wrong, right = json_reply(b"no gzip", content_encoding="gzip"), problem_reply(404, "not-found")
    connections, kept = 100, []  # as many as httpx opens by default
    with (
        scripted_server(*[wrong] * connections, right) as received,
        Client(received.url, timeout=TIMEOUT_S) as client,
    ):
        for _ in range(connections):
            with pytest.raises(httpx.DecodingError) as error:
                attend(client)
            kept.append(error.value)
        with pytest.raises(errors.NotFound):
            attend(client)
    assert len(kept) == connections


def test_large_body_is_sent_in_pieces() -> None:
    """Of any chunks, in either client, with the headers of one in a single piece."""
    chunks: list[bytes | memoryview] = [b"head", memoryview(bytes(range(256)) * 9000), b"", b"tail"]
    content = b"".join(chunks)

    async def read(request: httpx.Request) -> bytes:
        return await request.aread()

    with httpx.Client(base_url="http://here:1") as http:
        spec = RequestSpec("POST", "/p", lambda r: r, chunks)
        request = RequestTemplates(http).build(spec)
        own = http.build_request("POST", "/p", content=content)
        assert {*request.headers.raw} == {*own.headers.raw}
        assert isinstance(request.stream, httpx.SyncByteStream)
        assert max(map(len, request.stream)) == 1 << 20
        assert request.read() == content
        assert asyncio.run(read(RequestTemplates(http).build(spec))) == content


def test_templates_are_bounded_and_requests_differ() -> None:
    with httpx.Client(base_url="http://here:1/base", headers={"A": "b"}, timeout=7) as http:
        templates = RequestTemplates(http)
        for i in range(_MAX_TEMPLATES + 10):
            for content in (b"", b"12", b"345"):
                headers = {"Content-Type": "x/y"}
                spec = RequestSpec("POST", f"/p{i}", lambda r: r, [content], headers)
                request = templates.build(spec)
                own = http.build_request("POST", f"/p{i}", headers=spec.headers, content=content)
                assert (request.method, request.url) == (own.method, own.url)
                assert sorted(request.headers.raw) == sorted(own.headers.raw)
                assert request.extensions == own.extensions
                assert request.read() == content
        # nothing outside shows how many are kept, and so the memory that they take
        assert len(templates._templates) <= _MAX_TEMPLATES
        get = templates.build(RequestSpec("GET", "/p0", lambda r: r))
        assert (get.method, get.headers.get("content-type")) == ("GET", None)
