"""More than there is room for, over real sockets: what may wait, and what is counted."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from qkv.engine.admission import Admission
from qkv.engine.work_queue import Load
from qkv.jobs.convert import convert_message
from qkv.jobs.job import Job
from qkv.wire.message import Message
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import asked_of, encode_body, encode_request, random_inputs, raw_client
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


def test_so_many_requests_may_wait_and_no_more(serve: Serve) -> None:
    server = serve(max_queue=3)
    with ThreadPoolExecutor(3) as pool:
        with server.hold():
            waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
            server.wait_until_queued(3)
            for path, content in ((PATH, body()), (INFER, b"{}"), (PATH, b"no tensors at all")):
                response = httpx.post(server.url + path, content=content, headers=SAFETENSORS)
                assert response.status_code == 503  # whatever it says: it was not read
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert "3 requests wait already; at most 3 may" in response.text
        assert all(future.result().is_success for future in waiting)
    assert post(server.url, body()).is_success


def test_it_is_said_before_a_body_is_sent(serve: Serve) -> None:
    server = serve(max_queue_bytes=1000)
    with ThreadPoolExecutor(1) as pool, server.hold():
        waiting = pool.submit(post, server.url, body())
        server.wait_until_queued(1)
        with open_connection(server) as connection:
            head = f"{HEAD}Expect: 100-continue\r\nContent-Length: 900\r\n\r\n"
            connection.sendall(head.encode())
            said = read_head(connection)
        assert said.startswith("HTTP/1.1 503 ")
        assert "retry-after: 1\r\n" in said
        assert not waiting.done()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_sends_all_before_reading_is_answered_and_not_reset(
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
        assert server.engine.admission.incoming.requests == 0


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_come_in_count(serve: Serve, declared: bool) -> None:
    server = serve(max_queue_bytes=3000)
    length = "Content-Length: 2000" if declared else "Transfer-Encoding: chunked"
    piece = b" " * 1500 if declared else b"5dc\r\n%b\r\n" % (b" " * 1500)
    with open_connection(server) as slow:
        slow.sendall(f"{HEAD}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + piece)
        wait_until(lambda: server.engine.admission.incoming.bytes >= 1500)
        assert server.engine.admission.incoming.requests == 1
        problem = assert_problem(post(server.url, body(rows=40)), 503)
        assert "at most 3000 may" in problem["detail"]
        assert post(server.url, body()).is_success  # there is room for this one
        if declared:
            slow.sendall(b" " * 500)
            assert read_head(slow).startswith("HTTP/1.1 400 ")
    wait_until(
        lambda: server.engine.admission.incoming.requests == 0
    )  # answered, or gone in the midst of it
    assert post(server.url, body(rows=40)).is_success


def test_too_long_a_body_is_too_long_whatever_waits(serve: Serve) -> None:
    server = serve(max_queue_bytes=3000, max_body_bytes=2000)
    with ThreadPoolExecutor(1) as pool, server.hold():
        pool.submit(post, server.url, body())
        server.wait_until_queued(1)
        assert_problem(post(server.url, bytes(5000)), 413)


def test_retry_after_says_how_long_the_queue_is(serve: Serve, executed_jobs: list[Job]) -> None:
    """Each took two seconds, as far as the queue knows; three wait."""
    server = serve(max_queue=3)
    rate = server.engine._queue.throughput
    with ThreadPoolExecutor(3) as pool, server.hold():
        waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
        server.wait_until_queued(3)
        (load,) = {w.load for w in server.engine._queue._orders[2]}
        for _ in range(200):
            rate.add(load, 2.0)
        response = post(server.url, body())
        assert_problem(response, 503)
        assert response.headers["retry-after"] == "6"
    assert all(future.result().is_success for future in waiting)


def test_flops_that_wait_are_bounded(serve: Serve) -> None:
    server = serve(max_queue_flops=10_000)
    with ThreadPoolExecutor(2) as pool, server.hold():
        pool.submit(post, server.url, body(rows=2))
        server.wait_until_queued(1)
        problem = assert_problem(post(server.url, body(rows=50)), 503)
        assert "floating-point operations wait already" in problem["detail"]
        pool.submit(post, server.url, body(rows=2))
        server.wait_until_queued(2)


def test_conversions_count_while_they_come_in_and_until_they_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_queue=2)
    converting, leave = threading.Event(), threading.Event()

    def slow(message: Message) -> Message:
        converting.set()
        assert leave.wait(TIMEOUT_S)
        return convert_message(message)

    monkeypatch.setattr("qkv.api.endpoints.convert.convert_message", slow)
    layer = {name: [[1, 0], [0, 1]] for name in ("W_query", "W_key", "W_value")}
    content = json.dumps({"from": "v1", "to": "v2", "tensors": layer}).encode()

    def asked() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/convert", content=content, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(1) as pool, open_connection(server) as coming:
        running = pool.submit(asked)
        assert converting.wait(TIMEOUT_S)
        assert server.engine.admission.incoming.requests == 1
        assert server.engine.admission.incoming.bytes > len(content)
        head = "POST /v1/convert HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n\r\n"
        coming.sendall(head.encode())
        wait_until(lambda: server.engine.admission.incoming.requests == 2)
        for response in (asked(), post(server.url, body())):
            assert "2 requests wait already" in assert_problem(response, 503)["detail"]
            assert response.headers["retry-after"] == "1"
        leave.set()
        assert running.result(TIMEOUT_S).is_success
        wait_until(lambda: server.engine.admission.incoming.requests == 1)
        assert asked().is_success
    wait_until(lambda: server.engine.admission.incoming == Load())


def test_bodies_on_the_shortest_way_count_where_they_are_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come with their head are answered at once: nothing is counted for them."""
    server = serve(max_queue=1)
    admission, request = server.engine.admission, encode_request(*encode_body(random_inputs(0)))
    entered: list[int] = []
    admit = admission.admit

    def counted(size: int) -> Admission:
        entered.append(size)
        return admit(size)

    monkeypatch.setattr(admission, "admit", counted)
    with raw_client(server) as slow, raw_client(server) as other:
        for _ in range(4):
            other.send(request)
            other.read_response()
        assert len(entered) == 1  # the first, which took the long way
        entered.clear()
        slow.send(request[:-100])
        wait_until(lambda: admission.incoming.requests == 1)
        size = len(request.partition(b"\r\n\r\n")[2])
        assert entered == [size]
        assert admission.incoming.bytes == size
        slow.send(request[-100:-50])
        other.send(request)  # it is there as a whole, and waits for nothing
        other.read_response()
        assert entered == [size]
        other.send(request[:-100])
        wait_until(lambda: len(entered) == 3)  # refused here, and then on the long way
        other.send(request[-100:])
        assert other.status() == 503
        other.rest()
        assert admission.incoming.requests == 1
        slow.send(request[-50:])
        slow.read_response()
        wait_until(lambda: admission.incoming == Load())
        slow.send(request[:-100])
        wait_until(lambda: admission.incoming.requests == 1)
    wait_until(lambda: admission.incoming == Load())  # it left in the midst of it
    assert asked_of(server) == 0
