"""Requests on connections of the API: headers, a busy device, jobs that fail, models unloaded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

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
    RawClient,
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


def test_requests_of_several_agents_are_pipelined(server: Server, server_jobs: list[Job]) -> None:
    arrays = random_inputs(0)
    requests = [encode_request(*encode_body(arrays), PATH, f"User-Agent: {i}") for i in range(4)]
    with raw_client(server) as caller:
        caller.send(*requests)
        assert [caller.read_response()[2] for _ in requests] == [output_alone(arrays)] * 4
    assert len(server_jobs) == 4


def test_equal_heads_have_their_own_outputs(server: Server) -> None:
    """Also with ids, and with two kinds of body on one connection, in turn."""
    every = [random_inputs(seed) for seed in range(8)]
    outputs = [output_alone(arrays) for arrays in every]
    assert len(set(outputs)) == len(every)
    with raw_client(server) as caller:
        for i, (arrays, output) in enumerate(zip(every, outputs, strict=True)):
            body, length = encode_body(arrays)
            for id in ("mine", f"{length}-{i}"):
                caller.send(encode_request(body, length, PATH, f"X-Request-ID: {id}"))
                headers, _, data = caller.read_response()
                assert data == output
                assert headers["x-request-id"] == id
    causal = encode_request(*encode_body(every[0], parameters={"causal": True}))
    with raw_client(server) as caller:
        for _ in range(4):
            caller.send(encode_request(*encode_body(every[0])))
            assert caller.read_response()[2] == outputs[0]
            caller.send(causal)
            assert caller.read_response()[2] == output_alone(every[0], causal=True) != outputs[0]


CUTS: Final = ("nothing", "in the head", "the head", "in the body")


class CutRequest:
    """A request that is sent in two parts.

    Attributes:
        output: the bytes of its output.
    """

    def __init__(self, cut: str) -> None:
        arrays = random_inputs(0)
        body, length = encode_body(arrays)
        self.output, self._request = output_alone(arrays), encode_request(body, length)
        head = len(self._request) - len(body)
        self._at = dict(zip(CUTS, (0, head - 5, head, head + 9), strict=True))[cut]

    def send(self, caller: RawClient) -> None:
        """Sends the first part, and after a moment the second."""
        caller.send(self._request[: self._at])
        time.sleep(0.02)
        caller.send(self._request[self._at :])


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("cut", CUTS)
def test_small_request_does_not_wait_for_a_busy_device(
    server: Server, before: int, cut: str
) -> None:
    """As the first or the second request of a connection."""
    request = CutRequest(cut)
    with raw_client(server) as caller:
        for _ in range(before):
            request.send(caller)
            assert caller.read_response()[2] == request.output
        with server.hold_device_thread():
            for _ in range(2):
                request.send(caller)
                assert caller.read_response()[2] == request.output
            assert server.queued_count == 0
    wait_until(lambda: in_flight_count(server) == 0)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("cut", CUTS)
def test_queued_request_is_answered_once_the_device_is_free(
    server: Server, before: int, cut: str
) -> None:
    """As the first or the second request of a connection, which stays open."""
    request = CutRequest(cut)
    with raw_client(server) as caller:
        for _ in range(before):
            request.send(caller)
            assert caller.read_response()[2] == request.output
        for _ in range(2):
            with server.hold():
                request.send(caller)
                server.wait_until_queued(1)
            headers, _, data = caller.read_response()
            assert data == request.output
            assert "connection" not in headers
        request.send(caller)
        assert caller.read_response()[2] == request.output
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


def test_unloaded_model_gets_404_on_an_open_connection(serve: Callable[..., Server]) -> None:
    server = serve()
    request = encode_request(*encode_body(random_inputs(0)))
    with raw_client(server) as caller:
        caller.send(request, request)
        assert caller.read_response()[2] == caller.read_response()[2]
        assert server.http.post("/v2/repository/models/softmax/unload", json={}).status_code == 200
        caller.send(request)
        assert caller.status() == 404


def test_mask_may_end_at_any_byte(server: Server) -> None:
    """The tensors of this body together are no whole number of float32."""
    arrays = random_inputs(0, (1, 1, 3, 16)) | {"mask": np.zeros((1, 3), np.float16)}
    with raw_client(server) as caller:
        for _ in range(3):
            caller.send(encode_request(*encode_body(arrays)))
            assert caller.read_response()[2] == output_alone(arrays)
