"""Both clients say which response they got if it is none of a qkv service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from qkv import QkvError, errors
from support.clients import delays as delays
from support.clients import in_asyncio, numbers, send_sync
from support.scripted_server import EVENTS, Reply, json_reply, scripted_server
from support.service import Server

SAFETENSORS = "application/vnd.safetensors"
HTML = b"<!DOCTYPE html>\n<title>Welcome</title>"
HERE = {"location": "https://elsewhere/v1"}


async def _first(sweep: Any) -> Any:
    async for cell in sweep:
        return cell
    return None


def sweep(client: Any) -> Any:
    cells = client.sweep(["linear"], [4], progress=False)
    return _first(cells) if hasattr(cells, "__aiter__") else next(cells)


CALLS: dict[str, Callable[[Any], Any]] = {
    "run": lambda client: client.attend("softmax", **numbers()),
    "comparison": lambda client: client.compare(["linear"], **numbers()),
    "catalogue": lambda client: client.variants(),
    "sweep": sweep,
}
both_clients = pytest.mark.parametrize("send", [send_sync, in_asyncio])


@both_clients
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (json_reply(HTML, kind="text/html"), "not from a qkv service: got HTTP 200, text/html"),
        (json_reply(b"", kind="text/plain"), "got HTTP 200, text/plain"),
        (json_reply(HTML, 502, "text/html"), "got HTTP 502, text/html, that begins with '<!DOC"),
        (json_reply(b"", 500, "text/html"), "got HTTP 500, text/html, 0 bytes"),
        (json_reply([], 404), "got HTTP 404, application/json, that begins with '[]'"),
        (json_reply({"detail": "Not Found"}, 404), """begins with '{"detail": "Not Found"}'"""),
        (json_reply(b"[" * 100_000, 403), "got HTTP 403, application/json, that begins with '[[["),
        *(
            (json_reply(HTML, status, "text/html", **HERE), f"got HTTP {status} to 'https://elsew")
            for status in (301, 302, 303, 307, 308)
        ),
        (json_reply(HTML, 300, "text/html"), "got HTTP 300, text/html, that begins with"),
    ],
)
def test_response_of_another_server_is_described(
    send: Callable[..., Any], call: str, reply: Reply, expected: str
) -> None:
    with scripted_server(reply) as received:
        with pytest.raises(errors.MalformedRequest) as caught:
            send(received.url, CALLS[call], retries=0)
        assert expected in caught.value.detail
        assert len(received.paths) == 1


@both_clients
@pytest.mark.parametrize("content", [{}, [], None, {"variants": None}, b"", b"{", b"[" * 100_000])
def test_json_of_another_server_is_described(send: Callable[..., Any], content: Any) -> None:
    with scripted_server(json_reply(content)) as received:
        for name in ("run", "comparison", "catalogue"):
            if name == "catalogue" and content == {"variants": None}:
                continue
            with pytest.raises(errors.MalformedRequest) as caught:
                send(received.url, CALLS[name])
            assert caught.value.detail.startswith("the response is ")
            assert "got HTTP 200, application/json" in caught.value.detail


@both_clients
@pytest.mark.parametrize("length", [0, 7, 8, 100, 500, -1])
def test_cut_response_is_described(server: Server, send: Callable[..., Any], length: int) -> None:
    with scripted_server(json_reply(b"", 502)) as received:
        with pytest.raises(QkvError):
            send(received.url, CALLS["run"], retries=0)
        sent = received.bodies[0], received.headers[0]
    headers = {name: sent[1][name] for name in ("content-type", "accept")}
    whole = server.http.post("/v1/attention/softmax", content=sent[0], headers=headers).content
    cut = whole[:length]
    with (
        scripted_server(json_reply(cut, kind=SAFETENSORS)) as received,
        pytest.raises(errors.MalformedRequest) as caught,
    ):
        send(received.url, CALLS["run"])
    expected = f"damaged, or not from a qkv service: got HTTP 200, {SAFETENSORS}, {len(cut)} bytes:"
    assert expected in caught.value.detail


@both_clients
@pytest.mark.usefixtures("delays")
def test_connection_that_breaks_within_a_response_is_sent_again(send: Callable[..., Any]) -> None:
    def cut(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.close_connection = True

    with scripted_server(cut, json_reply({"variants": [1]})) as received:
        assert send(received.url, CALLS["catalogue"]) == [1]
        assert len(received.paths) == 2
    with scripted_server(cut) as received, pytest.raises(httpx.RemoteProtocolError):
        send(received.url, CALLS["catalogue"], retries=1)


@both_clients
@pytest.mark.parametrize("call", CALLS)
def test_response_that_cannot_be_decompressed_is_an_error_of_httpx(
    send: Callable[..., Any], call: str
) -> None:
    reply = json_reply(HTML, kind=EVENTS, content_encoding="gzip")
    with scripted_server(reply) as received, pytest.raises(httpx.DecodingError):
        send(received.url, CALLS[call])
