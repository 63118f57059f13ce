"""Admission control over real sockets: limits of the queue, and the bodies that count."""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from qkv.engine.admission import AdmittedBody
from qkv.engine.executor import Launched, launch
from qkv.jobs.convert import convert_message
from qkv.jobs.load import Load
from qkv.jobs.tenant import Tenant
from qkv.wire.message import Message
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.small_requests import (
    HEAD,
    INFER,
    PATH,
    SAFETENSORS,
    Serve,
    body,
    open_connection,
    post,
    read_head,
)
from support.small_requests import executed_jobs as executed_jobs

COMPRESSIONS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "identity": bytes, "gzip": gzip.compress, "deflate": zlib.compress
}  # fmt: skip
"""By the name of a Content-Encoding."""


def test_requests_beyond_max_queue_get_503(serve: Serve) -> None:
    server = serve(max_queue=3)
    with ThreadPoolExecutor(3) as pool:
        with server.hold():
            waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
            server.wait_until_queued(3)
            for path, content in ((PATH, body()), (INFER, b"{}"), (PATH, b"no tensors at all")):
                response = httpx.post(server.url + path, content=content, headers=SAFETENSORS)
                assert response.status_code == 503  # for any body: it is not read
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert "3 requests are queued or being received, the limit is 3" in response.text
        assert all(future.result().is_success for future in waiting)
    assert post(server.url, body()).is_success


def test_rejection_is_sent_before_100_continue(serve: Serve) -> None:
    server = serve(max_queue_bytes=1000)
    with ThreadPoolExecutor(1) as pool, server.hold():
        waiting = pool.submit(post, server.url, body())
        server.wait_until_queued(1)
        with open_connection(server) as connection:
            head = f"{HEAD}Expect: 100-continue\r\nContent-Length: 900\r\n\r\n"
            connection.sendall(head.encode())
            head_received = read_head(connection)
        assert head_received.startswith("HTTP/1.1 503 ")
        assert "retry-after: 1\r\n" in head_received
        assert not waiting.done()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_rejected_client_that_sends_all_first_gets_503_and_no_reset(
    serve: Serve, connection: str
) -> None:
    server = serve(max_queue_bytes=1000)
    content = bytes(24 << 20)
    with ThreadPoolExecutor(1) as pool, server.hold():
        pool.submit(post, server.url, body())
        server.wait_until_queued(1)
        for _ in range(3):
            response = post(server.url, content, Connection=connection)
            assert_problem(response, 503)
        assert server.engine.admission.bodies.total.requests == 0


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_being_received_count(serve: Serve, declared: bool) -> None:
    server = serve(max_queue_bytes=3000)
    length = "Content-Length: 2000" if declared else "Transfer-Encoding: chunked"
    piece = b" " * 1500 if declared else b"5dc\r\n%b\r\n" % (b" " * 1500)
    with open_connection(server) as slow:
        slow.sendall(f"{HEAD}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + piece)
        wait_until(lambda: server.engine.admission.bodies.total.bytes >= 1500)
        assert server.engine.admission.bodies.total.requests == 1
        problem = assert_problem(post(server.url, body(rows=40)), 503)
        assert "the limit is 3000" in problem["detail"]
        assert post(server.url, body()).is_success  # it fits
        if declared:
            slow.sendall(b" " * 500)
            assert read_head(slow).startswith("HTTP/1.1 400 ")
    wait_until(
        lambda: server.engine.admission.bodies.total.requests == 0
    )  # the response is sent, or the client has disconnected
    assert post(server.url, body(rows=40)).is_success


@pytest.mark.parametrize(
    ("path", "coding"), [*((PATH, name) for name in COMPRESSIONS), ("/v1/convert", "gzip")]
)
def test_body_that_outgrows_the_queue_gets_503_while_it_arrives(
    serve: Serve, path: str, coding: str
) -> None:
    """Its length is not declared, or its compressed length says little about its size."""
    server = serve(max_queue_bytes=1 << 21)
    content = COMPRESSIONS[coding](bytes(4 << 20))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {coding}\r\n"
    if coding == "identity":
        head += f"Transfer-Encoding: chunked\r\n\r\n{len(content):x}\r\n"
    else:
        head += f"Content-Length: {len(content) + 1}\r\n\r\n"
    with open_connection(server) as other, open_connection(server) as large:
        other.sendall(f"{HEAD}Content-Length: 9\r\n\r\n".encode())
        wait_until(lambda: server.engine.admission.bodies.total.requests == 1)
        large.sendall(head.encode() + content)  # the end of the body is missing
        rejection = read_head(large)
        assert rejection.startswith("HTTP/1.1 503 ")
        assert "retry-after: " in rejection
        assert server.engine.admission.bodies.total == Load(1, 9)
        headers = {"Content-Encoding": coding}
        for _ in range(2):  # on one connection, by a client that sends all before it reads
            response = server.http.post(path, content=iter([content]), headers=headers)
            assert response.status_code == 503
            assert "the limit is 2097152" in response.text
    wait_until(lambda: server.engine.admission.bodies.total == Load())
    assert server.http.post(path, content=iter([content]), headers=headers).status_code == 400


def test_body_over_the_limit_gets_413_even_with_a_full_queue(serve: Serve) -> None:
    server = serve(max_queue_bytes=3000, max_body_bytes=2000)
    with ThreadPoolExecutor(1) as pool, server.hold():
        pool.submit(post, server.url, body())
        server.wait_until_queued(1)
        assert_problem(post(server.url, bytes(5000)), 413)


def test_retry_after_grows_with_the_queue(serve: Serve) -> None:
    """The queue has three requests like one that took at least 0.4 s."""
    server = serve(max_queue=3)

    def slow(*how: Any) -> Launched:
        time.sleep(0.4)
        return launch(*how)

    with ThreadPoolExecutor(3) as pool:
        server.engine.batch_runner.launch = slow
        started_at = time.perf_counter()
        with server.hold():
            first = pool.submit(post, server.url, body())
            server.wait_until_queued(1)
        assert first.result(TIMEOUT_S).is_success
        spent = time.perf_counter() - started_at
        server.engine.batch_runner.launch = launch
        with server.hold():
            waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
            server.wait_until_queued(3)
            response = post(server.url, body())
            assert_problem(response, 503)
            assert 2 <= int(response.headers["retry-after"]) <= math.ceil(3 * spent)
    assert all(future.result().is_success for future in waiting)


def test_queued_flops_are_limited(serve: Serve) -> None:
    server = serve(max_queue_flops=10_000)
    with ThreadPoolExecutor(2) as pool, server.hold():
        pool.submit(post, server.url, body(rows=2))
        server.wait_until_queued(1)
        problem = assert_problem(post(server.url, body(rows=50)), 503)
        assert "floating-point operations are queued" in problem["detail"]
        pool.submit(post, server.url, body(rows=2))
        server.wait_until_queued(2)


def test_conversions_count_from_their_head_to_their_response(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_queue=2)
    converting, go_on = threading.Event(), threading.Event()

    def slow(message: Message, *_: object) -> Message:
        converting.set()
        assert go_on.wait(TIMEOUT_S)
        return convert_message(message)

    monkeypatch.setattr("qkv.api.endpoints.convert.convert_message", slow)
    layer = {name: [[1, 0], [0, 1]] for name in ("W_query", "W_key", "W_value")}
    content = json.dumps({"from": "v1", "to": "v2", "tensors": layer}).encode()

    def send_request() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/convert", content=content, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(1) as pool, open_connection(server) as receiving:
        running = pool.submit(send_request)
        assert converting.wait(TIMEOUT_S)
        assert server.engine.admission.bodies.total.requests == 1
        assert server.engine.admission.bodies.total.bytes > len(content)
        head = "POST /v1/convert HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        receiving.sendall(head.encode())
        wait_until(lambda: server.engine.admission.bodies.total.requests == 2)
        for response in (send_request(), post(server.url, body())):
            assert "2 requests are queued" in assert_problem(response, 503)["detail"]
            assert response.headers["retry-after"] == "1"
        go_on.set()
        assert running.result(TIMEOUT_S).is_success
        wait_until(lambda: server.engine.admission.bodies.total.requests == 1)
        assert send_request().is_success
    wait_until(lambda: server.engine.admission.bodies.total == Load())


def test_bodies_count_only_while_they_are_received(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is admitted once, also one whose body arrives with its head."""
    server = serve(max_queue=1)
    admission, request = server.engine.admission, encode_request(*encode_body(random_inputs(0)))
    size = len(request.partition(b"\r\n\r\n")[2])
    admitted: list[int] = []
    admit = admission.admit

    def counted(size: int, tenant: Tenant) -> AdmittedBody:
        admitted.append(size)
        return admit(size, tenant)

    monkeypatch.setattr(admission, "admit", counted)
    with raw_client(server) as slow, raw_client(server) as other:
        for _ in range(4):
            other.send(request)
            other.read_response()
        assert admitted == [size] * 4
        assert admission.bodies.total == Load()
        admitted.clear()
        slow.send(request[:-100])
        wait_until(lambda: admission.bodies.total.requests == 1)
        assert admitted == [size]
        assert admission.bodies.total.bytes == size
        slow.send(request[-100:-50])
        for cut in (len(request), -100):  # the limit is one request, however its body arrives
            other.send(request[:cut])
            if cut < 0:
                wait_until(lambda: len(admitted) == 3)
                other.send(request[cut:])
            assert other.status() == 503
            other.rest()
        assert admitted == [size] * 3
        assert admission.bodies.total.requests == 1
        slow.send(request[-50:])
        slow.read_response()
        wait_until(lambda: admission.bodies.total == Load())
        slow.send(request[:-100])
        wait_until(lambda: admission.bodies.total.requests == 1)
    wait_until(
        lambda: admission.bodies.total == Load()
    )  # the client disconnects before the end of the body
    assert in_flight_count(server) == 0
