"""Work that is no run ends with its client or its deadline, and runs do not wait for it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import httpx
import numpy as np
import pytest

from support.known_requests import as_json, assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

MATRICES: Final = {name: [[1, 0], [0, 1]] for name in ("W_query", "W_key", "W_value")}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/convert": {"from": "v1", "to": "v2", "tensors": MATRICES},
    "/v1/layers": {"shapes": {f"{name}.weight": [2, 2] for name in MATRICES}},
}
PLACES: Final = {"/v1/convert": "convert.convert_message", "/v1/layers": "layers.list_layers"}


class EndlessWork:
    """Work that ends only if its endpoint stops it between two pieces; counts what runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self.begun = self.running = 0
        self._lock, self._pause = threading.Lock(), threading.Event()
        monkeypatch.setattr(f"qkv.api.endpoints.{PLACES[path]}", self._work)

    def _work(self, _: object, raise_if_stopped: Callable[[], None], *__: object) -> None:
        with self._lock:
            self.begun, self.running = self.begun + 1, self.running + 1
        try:
            while True:
                raise_if_stopped()
                self._pause.wait(0.001)
        finally:
            with self._lock:
                self.running -= 1


def send_large_run(server: Server) -> httpx.Response:
    """Sends a run that uses a thread of asyncio to decode its body."""
    query = as_json(np.ones((1, 1, 2048, 64), np.float32), "base64")
    body = {"inputs": dict.fromkeys(("query", "key", "value"), query), "outputs": ["output"]}
    return server.http.post("/v1/attention/softmax", json=body)


@pytest.mark.parametrize("path", BODIES)
def test_work_of_clients_that_leave_ends_and_runs_do_not_wait(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    clients = 12  # more than asyncio has threads on two cores
    with monkeypatch.context() as patch, ExitStack() as leaving:
        work = EndlessWork(patch, path)

        body = json.dumps(BODIES[path])
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(clients):
            leaving.enter_context(socket.create_connection(server.address, TIMEOUT_S)).sendall(
                (head + body).encode()
            )
        wait_until(lambda: server.engine.admission.bodies.total.requests == clients)
        wait_until(lambda: work.running in (1, 2))
        assert send_large_run(server).is_success
        assert work.running in (1, 2)
        leaving.close()
        wait_until(lambda: server.engine.admission.bodies.total.requests == 0)
        assert work.running == 0
    assert server.http.post(path, json=BODIES[path]).is_success


def test_client_that_leaves_has_its_request_admitted_until_the_thread_is_free(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped within a piece of its work, and holds the tensors so long."""
    begun, stopped, piece_ends = threading.Event(), threading.Event(), threading.Event()

    def work(_: object, raise_if_stopped: Callable[[], None]) -> None:
        begun.set()
        try:
            while not piece_ends.wait(0.001):
                raise_if_stopped()
        finally:
            stopped.set()
            piece_ends.wait(TIMEOUT_S)

    def admitted() -> int:
        return server.engine.admission.bodies.total.requests

    monkeypatch.setattr("qkv.api.endpoints.layers.list_layers", work)
    body = json.dumps(BODIES["/v1/layers"])
    head = f"POST /v1/layers HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        with socket.create_connection(server.address, TIMEOUT_S) as leaving:
            leaving.sendall((head + body).encode())
            assert begun.wait(TIMEOUT_S)
        assert stopped.wait(TIMEOUT_S)
        for _ in range(3):  # the event loop has gone on
            assert server.http.get("/livez").is_success
        assert admitted() == 1
    finally:
        piece_ends.set()
    wait_until(lambda: admitted() == 0)


@pytest.mark.parametrize("path", BODIES)
def test_deadline_holds_for_waiting_and_for_work(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    work = EndlessWork(monkeypatch, path)

    def send(timeout_s: float) -> httpx.Response:
        headers = {"X-Request-Timeout": str(timeout_s)}
        return httpx.post(server.url + path, json=BODIES[path], headers=headers, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(4) as pool:
        for response in pool.map(send, (0.5, 0.5, 0.4, 0.4)):
            assert "its deadline passed" in assert_problem(response, 504)["detail"]
    assert work.begun > 0
    assert work.running == 0
    begun = work.begun
    assert_problem(send(1e-9), 504)
    assert work.begun == begun
    assert_problem(server.http.post(path, json={}, headers={"X-Request-Timeout": "0"}), 400)
