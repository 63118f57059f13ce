"""Tests of the client's retries: which requests are sent again, how often, and when."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from qkv import Client, QkvError, errors
from support.clients import client as client
from support.clients import delays as delays
from support.clients import in_asyncio, numbers, same_run, send_sync
from support.processes import TIMEOUT_S
from support.scripted_server import (
    Reply,
    drop_connection,
    json_reply,
    problem_reply,
    scripted_server,
)

GOOD: Final = json_reply({"variants": [{"variant": "a"}]})
SHARE: Final = problem_reply(429, "too-many-requests", retry_after="0")


def busy(retry_after: str = "0") -> Reply:
    return problem_reply(503, "service-unavailable", retry_after=retry_after)


PROXY_ERRORS: Final = [
    json_reply(b"", 500, ""),
    json_reply(b"Internal Server Error", 500, "text/plain; charset=utf-8"),
    json_reply(b"<h1>Bad gateway</h1>", 502, "text/html"),
    json_reply({"status": 503, "detail": "no upstream"}, 503),
    json_reply(b"upstream request timeout", 504, "text/plain"),
]
KINDS = pytest.mark.parametrize("send", [send_sync, in_asyncio], ids=["sync", "async"])


def catalogue(client: Any) -> Any:
    return client.variants()


@KINDS
@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(
    "before",
    [
        [],
        [busy()],
        [busy(), busy()],
        [SHARE],
        [drop_connection],
        [drop_connection, busy()],
        [busy(), drop_connection],
    ],
    ids=["at once", "busy", "busy twice", "share", "closed", "closed, busy", "busy, closed"],
)
def test_temporary_failure_is_retried(send: Any, before: list[Reply]) -> None:
    with scripted_server(*before, GOOD) as script:
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
        replies.append(json_reply(response.content, kind=response.headers["content-type"]))
        return httpx.Response(200, content=response.content)

    replies: list[Reply] = []
    with Client("http://localhost", transport=httpx.MockTransport(keep)) as through:
        first = through.attend("softmax", **numbers())
    with scripted_server(busy(), drop_connection, replies[0]) as script:
        again = send(script.url, lambda c: c.attend("softmax", **numbers()))
        assert same_run(first, again)
        assert script.bodies == sent * 3


@KINDS
def test_key_at_its_share_is_an_error_of_its_own(send: Any) -> None:
    with scripted_server(SHARE) as script, pytest.raises(errors.TooManyRequests, match="because"):
        send(script.url, catalogue, retries=0)


@KINDS
@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_retries_are_limited(send: Any, retries: int) -> None:
    with scripted_server(busy()) as script:
        with pytest.raises(errors.ServiceUnavailable, match="because"):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1
    with scripted_server(drop_connection) as script:
        with pytest.raises(httpx.RemoteProtocolError):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1


@KINDS
@pytest.mark.parametrize(
    "refusal",
    [
        problem_reply(422, "invalid-content"),
        problem_reply(422, "invalid-content", retry_after="0"),
        problem_reply(400, "malformed-request"), problem_reply(404, "not-found"),
        problem_reply(413, "payload-too-large"), problem_reply(500, "internal"),
        problem_reply(503, "service-unavailable"), problem_reply(504, "deadline-exceeded"),
        json_reply(b"<h1>Not found</h1>", 404, "text/html"),
        json_reply(b"<h1>Welcome</h1>", kind="text/html"),
    ],
)  # fmt: skip
def test_permanent_error_is_not_retried(send: Any, refusal: Reply) -> None:
    with scripted_server(refusal) as script:
        with pytest.raises(QkvError):
            send(script.url, catalogue)
        assert len(script.bodies) == 1


of_proxies = pytest.mark.parametrize(
    "failure", PROXY_ERRORS, ids=["empty 500", "500", "502", "503", "504"]
)


@KINDS
@of_proxies
def test_server_error_of_a_proxy_is_retried(send: Any, failure: Reply, delays: list[float]) -> None:
    inputs = numbers()
    with scripted_server(failure, busy("3"), drop_connection, GOOD) as script:
        assert send(script.url, catalogue) == [{"variant": "a"}]
    assert delays == [0.1, 3.0, 1.6]
    with scripted_server(failure, failure, problem_reply(422, "invalid-content")) as script:
        with pytest.raises(errors.InvalidContent):
            send(script.url, lambda client: client.attend("softmax", **inputs))
        first, *again = script.bodies
        assert again == [first] * 2


@KINDS
@pytest.mark.parametrize("retries", [0, 2])
def test_retries_after_errors_of_a_proxy_are_limited(
    send: Any, retries: int, delays: list[float]
) -> None:
    with scripted_server(json_reply(b"<h1>Bad gateway</h1>", 502, "text/html")) as script:
        with pytest.raises(QkvError):
            send(script.url, catalogue, retries=retries)
        assert len(script.bodies) == retries + 1
    assert delays == [0.1, 0.4][:retries]


@KINDS
def test_problem_document_of_the_service_ends_the_retries(send: Any, delays: list[float]) -> None:
    problem = {"type": "urn:qkv:problem:internal", "status": 500, "detail": "because"}
    written = json_reply(problem, 500, "Application/Problem+JSON; charset=utf-8")
    with scripted_server(json_reply(b"", 502, "text/html"), written, GOOD) as script:
        with pytest.raises(errors.Internal, match="because"):
            send(script.url, catalogue)
        assert len(script.bodies) == 2


@KINDS
def test_limit_of_a_proxy_is_service_unavailable(send: Any) -> None:
    full = json_reply(b"Request dropped due to backpressure", 503, "text/plain", retry_after="7")
    with scripted_server(full) as script, pytest.raises(errors.ServiceUnavailable) as caught:
        send(script.url, catalogue, retries=0)
    assert caught.value.retry_after == 7
    assert "got HTTP 503, text/plain, that begins with 'Request dropped" in caught.value.detail


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
        with scripted_server(GOOD, port=port) as script:
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
        with scripted_server(*replies) as script:
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
    with (
        scripted_server(busy(retry_after)) as script,
        pytest.raises(errors.ServiceUnavailable) as caught,
    ):
        send(script.url, catalogue, retries=0)
    assert caught.value.retry_after == int(retry_after)
