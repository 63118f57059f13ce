"""Tests of the client's retries: which requests are sent again, how often, and when."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from qkv import Client, QkvError, errors
from support.clients import client as client
from support.clients import delays as delays
from support.clients import in_asyncio, numbers, same_run
from support.processes import TIMEOUT_S

Reply = tuple[int, dict[str, str], bytes] | None
GOOD: Reply = (200, {"content-type": "application/json"}, b'{"variants": [{"variant": "a"}]}')


def problem(status: int, name: str, **headers: str) -> Reply:
    text = f'{{"type": "urn:qkv:problem:{name}", "status": {status}, "detail": "because"}}'
    named = {n.replace("_", "-"): v for n, v in headers.items()}
    return status, {"content-type": "application/problem+json"} | named, text.encode()


SHARE: Reply = problem(429, "too-many-requests", retry_after="0")


def busy(retry_after: str = "0") -> Reply:
    return problem(503, "service-unavailable", retry_after=retry_after)


@dataclass
class Script:
    """A service that sends one reply for each request; None closes the connection.

    Attributes:
        url: of the service.
        replies: that are still to be sent; the last one is sent for all later requests.
        bodies: of the requests, in order.
    """

    url: str
    replies: list[Reply]
    bodies: list[bytes] = field(default_factory=list)

    def next(self, body: bytes) -> Reply:
        self.bodies.append(body)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextlib.contextmanager
def scripted(*replies: Reply, port: int = 0) -> Iterator[Script]:
    script = Script("", list(replies))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            reply = script.next(self.rfile.read(int(self.headers.get("content-length", 0))))
            if reply is None:
                self.close_connection = True
                return
            status, headers, content = reply
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        script.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield script
        finally:
            http.shutdown()
            thread.join(TIMEOUT_S)


def one(url: str, call: Callable[[Any], Any], **options: Any) -> Any:
    with Client(url, **options) as client:
        return call(client)


KINDS = pytest.mark.parametrize("send", [one, in_asyncio], ids=["sync", "async"])


def catalogue(client: Any) -> Any:
    return client.variants()


@KINDS
@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(
    "before",
    [[], [busy()], [busy(), busy()], [SHARE], [None], [None, busy()], [busy(), None]],
    ids=["at once", "busy", "busy twice", "share", "closed", "closed, busy", "busy, closed"],
)
def test_temporary_failure_is_retried(send: Any, before: list[Reply]) -> None:
    with scripted(*before, GOOD) as script:
        assert send(script.url, catalogue) == [{"variant": "a"}]
        assert len(script.bodies) == len(before) + 1


@KINDS
@pytest.mark.usefixtures("delays")
def test_retried_run_has_the_same_body(url: str, send: Any) -> None:
    sent: list[bytes] = []

    def keep(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        response = httpx.post(url + request.url.path, content=request.content,
                              headers=request.headers)  # fmt: skip
        replies.append((200, {"content-type": response.headers["content-type"]}, response.content))
        return httpx.Response(200, content=response.content)

    replies: list[Reply] = []
    with Client("http://localhost", transport=httpx.MockTransport(keep)) as through:
        first = through.attend("softmax", **numbers())
    with scripted(busy(), None, replies[0]) as script:
        again = send(script.url, lambda c: c.attend("softmax", **numbers()))
        assert same_run(first, again)
        assert script.bodies == sent * 3


@KINDS
def test_key_at_its_share_is_an_error_of_its_own(send: Any) -> None:
    with scripted(SHARE) as script, pytest.raises(errors.TooManyRequests, match="because"):
        send(script.url, catalogue, retries=0)


@KINDS
@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_retries_are_limited(send: Any, retries: int) -> None:
    with scripted(busy()) as script:
        with pytest.raises(errors.ServiceUnavailable, match="because"):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1
    with scripted(None) as script:
        with pytest.raises(httpx.RemoteProtocolError):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1


@KINDS
@pytest.mark.parametrize(
    "refusal",
    [
        problem(422, "invalid-content"), problem(422, "invalid-content", retry_after="0"),
        problem(400, "malformed-request"), problem(404, "not-found"),
        problem(413, "payload-too-large"), problem(500, "internal"),
        problem(503, "service-unavailable"), problem(504, "deadline-exceeded"),
        (404, {}, b"<h1>Not found</h1>"), (200, {}, b"<h1>Welcome</h1>"),
    ],
    ids=lambda refusal: str(refusal[0]),
)  # fmt: skip
def test_permanent_error_is_not_retried(send: Any, refusal: Reply) -> None:
    with scripted(refusal) as script:
        with pytest.raises(QkvError):
            send(script.url, catalogue)
        assert len(script.bodies) == 1


PROXY_ERRORS: list[Reply] = [
    (500, {}, b""),
    (500, {"content-type": "text/plain; charset=utf-8"}, b"Internal Server Error"),
    (502, {"content-type": "text/html"}, b"<h1>Bad gateway</h1>"),
    (503, {"content-type": "application/json"}, b'{"status": 503, "detail": "no upstream"}'),
    (504, {"content-type": "text/plain"}, b"upstream request timeout"),
]
of_proxies = pytest.mark.parametrize(
    "failure", PROXY_ERRORS, ids=["empty 500", "500", "502", "503", "504"]
)


@KINDS
@of_proxies
def test_server_error_of_a_proxy_is_retried(send: Any, failure: Reply, delays: list[float]) -> None:
    inputs = numbers()
    with scripted(failure, busy("3"), None, GOOD) as script:
        assert send(script.url, catalogue) == [{"variant": "a"}]
    assert delays == [0.1, 3.0, 1.6]
    with scripted(failure, failure, problem(422, "invalid-content")) as script:
        with pytest.raises(errors.InvalidContent):
            send(script.url, lambda client: client.attend("softmax", **inputs))
        first, *again = script.bodies
        assert again == [first] * 2


@KINDS
@of_proxies
@pytest.mark.parametrize("retries", [0, 2])
def test_retries_after_errors_of_a_proxy_are_limited(
    send: Any, failure: Reply, retries: int, delays: list[float]
) -> None:
    with scripted(failure) as script:
        with pytest.raises(QkvError):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1
    assert delays == [0.1, 0.4][:retries]


@KINDS
def test_problem_document_of_the_service_ends_the_retries(send: Any, delays: list[float]) -> None:
    status, _, text = problem(500, "internal")  # type: ignore[misc]
    written = status, {"content-type": "Application/Problem+JSON; charset=utf-8"}, text
    with scripted((502, {}, b""), written, GOOD) as script:
        with pytest.raises(errors.Internal, match="because"):
            send(script.url, catalogue)
        assert len(script.bodies) == 2


@KINDS
def test_limit_of_a_proxy_is_service_unavailable(send: Any) -> None:
    full: Reply = (503, {"retry-after": "7"}, b"Request dropped due to backpressure")
    with scripted(full) as script, pytest.raises(errors.ServiceUnavailable) as caught:
        send(script.url, catalogue, retries=0)
    assert caught.value.retry_after == 7


@KINDS
def test_service_that_starts_later_is_reached(send: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(httpx.ConnectError):
        send(url, catalogue, retries=0)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(send, url, catalogue, retries=6)
        time.sleep(0.05)  # the first attempt is refused, unless this thread is slow
        with scripted(GOOD, port=port) as script:
            assert response.result(TIMEOUT_S) == [{"variant": "a"}]
            assert len(script.bodies) == 1


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    "retry_after",
    [
        "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "", "nan", "-nan", "-1", "-inf", "1e-400", "0x1",
        "1_0e-9", "\u00bd",
    ],
)  # fmt: skip
def test_any_retry_after_is_a_delay_of_at_most_10_seconds(
    send: Any, retry_after: str, delays: list[float]
) -> None:
    for retries in (1, 0):
        replies = [busy(retry_after), GOOD] if retries else [busy(retry_after)]
        with scripted(*replies) as script:
            if retries:
                assert send(script.url, catalogue, retries=1) == [{"variant": "a"}]
            else:
                with pytest.raises(errors.ServiceUnavailable):
                    send(script.url, catalogue, retries=0)
            assert len(script.bodies) == retries + 1
    assert len(delays) == 1
    assert 0 <= delays[0] <= 10


@KINDS
@pytest.mark.parametrize("retry_after", ["3", "10", "30", "3600"])
def test_error_has_the_retry_after_of_the_response(send: Any, retry_after: str) -> None:
    with scripted(busy(retry_after)) as script, pytest.raises(errors.ServiceUnavailable) as caught:
        send(script.url, catalogue, retries=0)
    assert caught.value.retry_after == int(retry_after)
