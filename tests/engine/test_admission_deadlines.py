"""Queued requests that never run: expired deadlines and disconnected clients."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from qkv.jobs.job import Job
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.service import Server
from support.small_requests import HEAD, INFER, SAFETENSORS, Serve, body, open_connection, post
from support.small_requests import executed_jobs as executed_jobs


def test_client_sets_a_deadline(serve: Serve, executed_jobs: list[Job]) -> None:
    server = serve()
    document = {
        "inputs": [
            {"name": n, "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            for n in ("query", "key", "value")
        ]
    }
    with server.hold():
        executed_jobs.clear()
        problem = assert_problem(post(server.url, body(), **{"X-Request-Timeout": "0.05"}), 504)
        assert problem["detail"] == "the request waited 50 ms in the queue, its deadline passed"
        late = httpx.post(server.url + INFER, json=document, headers={"X-Request-Timeout": "0.05"})
        assert late.status_code == 503
        assert "50 ms" in late.text
        document["parameters"] = {"timeout": 20_000}  # type: ignore[assignment]
        late = httpx.post(server.url + INFER, json=document, headers={"X-Request-Timeout": "9"})
        assert "20 ms" in late.text
        assert server.queued_count == 0
    assert post(server.url, body(), **{"X-Request-Timeout": "9"}).is_success
    assert len(executed_jobs) == 1


def test_setting_limits_every_deadline(serve: Serve, executed_jobs: list[Job]) -> None:
    server = serve(request_timeout_s=0.05)
    with server.hold():
        executed_jobs.clear()
        assert "50 ms" in assert_problem(post(server.url, body()), 504)["detail"]
        for header, wait in (("0.02", "20 ms"), ("20", "50 ms")):
            response = post(server.url, body(), **{"X-Request-Timeout": header})
            assert wait in assert_problem(response, 504)["detail"]
    assert post(server.url, body()).is_success
    assert len(executed_jobs) == 1


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "soon", "", "1e10", "1_0"])
def test_invalid_deadline_gets_400(server: Server, header: str) -> None:
    problem = assert_problem(post(server.url, body(), **{"X-Request-Timeout": header}), 400)
    assert "X-Request-Timeout" in problem["detail"]


def test_expired_job_does_not_run_if_the_event_loop_was_busy(
    serve: Serve, executed_jobs: list[Job]
) -> None:
    server = serve()
    entered, go_on = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert go_on.wait(TIMEOUT_S)

    with ThreadPoolExecutor(1) as pool:
        with server.hold():
            executed_jobs.clear()
            late = pool.submit(post, server.url, body(), **{"X-Request-Timeout": "0.5"})
            server.wait_until_queued(1)
            server.loop.call_soon_threadsafe(block)
            assert entered.wait(TIMEOUT_S)
            time.sleep(0.6)
        wait_until(lambda: server.queued_count == 0)  # the device thread takes the expired job
        go_on.set()
        assert "500 ms" in assert_problem(late.result(TIMEOUT_S), 504)["detail"]
    assert executed_jobs == []


def test_jobs_of_200_disconnected_clients_do_not_run(
    serve: Serve, executed_jobs: list[Job]
) -> None:
    server = serve(max_batch=32)
    content = body()
    head = f"{HEAD}Content-Type: {SAFETENSORS['Content-Type']}\r\nContent-Length: {len(content)}"
    with ThreadPoolExecutor(1) as pool:
        with server.hold():
            executed_jobs.clear()
            with ExitStack() as stack:
                for _ in range(200):
                    connection = stack.enter_context(open_connection(server))
                    connection.sendall(head.encode() + b"\r\n\r\n" + content)
                server.wait_until_queued(200)
                staying = pool.submit(post, server.url, body(seed=1))
                server.wait_until_queued(201)
            server.wait_until_queued(1)
        assert staying.result(TIMEOUT_S).is_success
    assert len(executed_jobs) == 1
    assert server.queued_count == 0
