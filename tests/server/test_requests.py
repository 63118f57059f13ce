"""Requests on connections of the API: headers, a busy device, and jobs that fail."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from qkv.api.job_runner import JobRunner
from qkv.engine.engine import Engine
from qkv.jobs.job import Job
from qkv.wire import open_inference
from support import failing_device
from support.engines import output_alone
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.raw_connection import server_jobs as server_jobs
from support.service import Server
from support.small_requests import body as small_body
from support.small_requests import post


@pytest.mark.parametrize(
    "line",
    [
        "Connection: close", "Accept-Encoding: gzip", "Expect: 100-continue", "X-Anything: 1",
        "Content-Encoding: identity", "Upgrade: websocket",
    ],
)  # fmt: skip
def test_header_does_not_change_the_output(server: Server, line: str) -> None:
    arrays = random_inputs(0)
    output = output_alone(arrays)
    end = output if "gzip" not in line else b" 200 OK"
    for _ in range(3):
        with socket.create_connection(server.address, TIMEOUT_S) as connection:
            connection.sendall(encode_request(*encode_body(arrays), PATH, line))
            received = b""
            while end not in received:
                received += (more := connection.recv(1 << 20))
                assert more, received
            assert b" 200 OK" in received
    wait_until(lambda: in_flight_count(server) == 0)


def test_small_request_does_not_wait_for_a_busy_device(server: Server) -> None:
    arrays = random_inputs(0)
    request, output = encode_request(*encode_body(arrays)), output_alone(arrays)
    with raw_client(server) as caller, server.hold_device_thread():
        for _ in range(2):
            caller.send(request)
            assert caller.read_response()[2] == output
        assert server.queued_count == 0
    wait_until(lambda: in_flight_count(server) == 0)


def test_queued_request_is_answered_once_the_device_is_free(server: Server) -> None:
    """As the first or the second request of a connection, which stays open."""
    arrays = random_inputs(0)
    request, output = encode_request(*encode_body(arrays)), output_alone(arrays)
    with raw_client(server) as caller:
        for _ in range(2):
            with server.hold():
                caller.send(request)
                server.wait_until_queued(1)
            headers, _, data = caller.read_response()
            assert data == output
            assert "connection" not in headers
        caller.send(request)
        assert caller.read_response()[2] == output
    wait_until(lambda: in_flight_count(server) == 0)


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("marked")


@pytest.mark.parametrize("step", ["validate", "run", "execute", "encode"])
def test_request_that_fails_gets_500_and_the_next_one_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """On the same connection and on others; each byte of a body is counted once."""
    targets: dict[str, tuple[Any, str]] = {
        "validate": (Job, "checked"),
        "run": (JobRunner, "run"),
        "execute": (server.engine.batch_runner, "launch"),
        "encode": (open_inference, "encode_tensors"),
    }
    counters = server.runtime.worker.shared_state.counters
    arrays = random_inputs(0)
    body, length = encode_body(arrays)
    request, output = encode_request(body, length), output_alone(arrays)
    with raw_client(server) as caller, raw_client(server) as other:
        for client in (caller, other):
            client.send(request)
            assert client.read_response()[2] == output
        before = counters.total("request_body_bytes")
        with monkeypatch.context() as patch:
            patch.setattr(*targets[step], fail)
            caller.send(request)
            assert caller.status() == 500
            problem = caller.rest()
        assert list(json.loads(problem)) == ["error"]
        assert b"marked" not in problem
        assert counters.total("request_body_bytes") - before == len(body)
        for client in (caller, other):
            client.send(request)
            assert client.read_response()[2] == output
    wait_until(lambda: in_flight_count(server) == 0)


def test_after_a_fatal_error_all_requests_get_503_and_readyz_fails(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.api.app.Engine", partial(Engine, launch=failing_device.failing))
    monkeypatch.setattr("qkv.api.app.new_device", lambda *_: failing_device.FailingDevice())
    failing_device.broken.clear()
    server = serve(max_batch=4)
    assert server.http.get("/readyz").status_code == 200
    with ThreadPoolExecutor(12) as pool:
        with server.hold():
            futures = [pool.submit(post, server.url, small_body(failing_device.STICKY))]
            server.wait_until_queued(1)
            futures += [
                pool.submit(post, server.url, small_body(rows=2 + i % 3)) for i in range(11)
            ]
            server.wait_until_queued(12)
        responses = [future.result(TIMEOUT_S) for future in futures]
    for response in responses:
        assert "the device has failed" in assert_problem(response, 503)["detail"]
        assert int(response.headers["retry-after"]) >= 1
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/livez").status_code == 200
    assert_problem(post(server.url, small_body()), 503)


def test_mask_may_end_at_any_byte(server: Server) -> None:
    """The tensors of this body together are no whole number of float32."""
    arrays = random_inputs(0, (1, 1, 3, 16)) | {"mask": np.zeros((1, 3), np.float16)}
    with raw_client(server) as caller:
        for _ in range(3):
            caller.send(encode_request(*encode_body(arrays)))
            assert caller.read_response()[2] == output_alone(arrays)
