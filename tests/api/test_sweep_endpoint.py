"""Events of sweeps over real sockets: client disconnects, other requests, and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from qkv.api import event_stream
from qkv.jobs.job import Job
from qkv.jobs.measure.sweep_request import SweepRequest
from support.known_requests import assert_problem
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server, running_server
from support.sweep_requests import CELL, SMALL, SWEEP, open_sweep, parse_events, run_sweep
from support.sweep_requests import submitted_jobs as submitted_jobs


def test_headers_and_bytes_on_the_wire(server: Server) -> None:
    with open_sweep(server, variants=["mean"], lengths=[8]) as connection:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = connection.recv(1 << 16)
            assert piece, received
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lines = {line.lower() for line in head.split(b"\r\n")}
    assert b"http/1.1 200 ok" in lines
    assert b"content-type: text/event-stream" in lines
    assert b"cache-control: no-store" in lines
    assert b"transfer-encoding: chunked" in lines
    assert not any(line.startswith(b"content-length") for line in lines)
    assert any(line.startswith(b"x-request-id: ") for line in lines)
    assert body.count(b"event: ") == 3
    assert b'event: progress\ndata: {"done":0,' in body


def test_events_are_sent_during_the_sweep(server: Server) -> None:
    """The first cell arrives before the second runs."""
    with server.hold(), open_sweep(server, variants=["mean"], lengths=[8, 16]) as connection:
        wait_until(lambda: server.queued_count == 1)
        received = connection.recv(1 << 16)
        if b"progress" not in received:
            received += connection.recv(1 << 16)
        assert received.count(b"event: progress") == 1
        assert b"event: cell" not in received


def test_comments_are_sent_as_heartbeat(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_stream.HEARTBEAT_S == 10
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.02)
    body = SMALL | {"variants": ["mean"], "lengths": [8]}
    with server.hold(), server.http.stream("POST", SWEEP, json=body) as response:
        lines = response.iter_lines()
        received = [next(lines) for _ in range(12)]
        assert received.count(": still at work") >= 3
    assert [name for name, _ in parse_events(iter([*received, ""]))] == ["progress"]


def test_client_disconnect_ends_the_sweep(
    server: Server, submitted_jobs: list[tuple[Job, int]]
) -> None:
    """The remaining cells do not run."""
    lengths = list(range(8, 40))
    with open_sweep(server, variants=["mean", "linear"], lengths=lengths) as client:
        with server.hold():
            wait_until(lambda: server.queued_count == 1)
            client.close()
            wait_until(lambda: server.queued_count == 0)
        seen = len(submitted_jobs)
    assert server.http.post("/v1/attention/mean", json={"inputs": {"value": [[1]]}}).is_success
    run_sweep(server, variants=["mean"], lengths=[8])
    assert len(submitted_jobs) == seen + 1 + SMALL["repeats"]
    assert seen < len(lengths)


def test_disconnected_sweep_keeps_its_admission_until_its_thread_ends(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve()
    has_started, may_continue = threading.Event(), threading.Event()
    drawn = SweepRequest.draw

    def slowly(*arguments: Any) -> Any:
        has_started.set()
        assert may_continue.wait(TIMEOUT_S)
        return drawn(*arguments)

    monkeypatch.setattr(SweepRequest, "draw", slowly)
    with open_sweep(own, variants=["mean"], lengths=[8]) as client:
        assert has_started.wait(TIMEOUT_S)
        load_before = own.engine.admission.bodies.total
        client.close()
        own.http.get("/livez")
        time.sleep(0.1)  # the admission is released by then
        assert own.engine.admission.bodies.total == load_before
        assert load_before.bytes
        may_continue.set()
    wait_until(lambda: not own.engine.admission.bodies.total.bytes)


def test_client_disconnect_is_counted(serve: Callable[..., Server]) -> None:
    own = serve()

    def left() -> bool:
        return (
            'qkv_other_requests_total{outcome="client-disconnected"} 1.0\n'
            in own.http.get("/metrics").text
        )

    with own.hold(), open_sweep(own, variants=["mean"], lengths=[8]) as client:
        wait_until(lambda: own.queued_count == 1)
        client.close()
        wait_until(lambda: own.queued_count == 0)
    wait_until(left)


def test_other_requests_run_before_the_sweep(
    server: Server, submitted_jobs: list[tuple[Job, int]]
) -> None:
    """All other queued requests have a higher priority; a sweep queues one job at a time."""
    value = np.ones((600, 64)).tolist()  # too large to run inline
    connection = open_sweep(server, variants=["linear"], lengths=list(range(64, 128)), repeats=100)
    try:
        wait_until(lambda: len(submitted_jobs) > 3)
        results: list[int] = []
        with server.hold():
            wait_until(lambda: server.queued_count == 1)
            _, lowest = submitted_jobs[-1]  # of the sweep; 1 is the highest
            threads = [
                threading.Thread(
                    target=lambda: results.append(
                        httpx.post(
                            f"{server.url}/v1/attention/softmax",
                            json={
                                "inputs": dict.fromkeys(("query", "key", "value"), value),
                                "weights": "none",
                            },
                            timeout=TIMEOUT_S,
                        ).status_code
                    )
                )
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.queued_count == 5)
            assert all(priority < lowest for _, priority in submitted_jobs[-4:])
        for thread in threads:
            thread.join()
        assert results == [200] * 4
        assert len(submitted_jobs) < 64 * 101, "it is not over yet"
    finally:
        connection.close()
        wait_until(lambda: server.queued_count == 0)


def test_internal_error_ends_the_stream(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(own.engine, "submit", broken)
    events = run_sweep(own, variants=["mean"], lengths=[8])
    assert [name for name, _ in events] == ["progress", "error"]
    assert events[-1][1]["problem"]["status"] == 500
    assert "ZeroDivision" not in str(events)


def test_stopping_service_sends_an_error_event() -> None:
    with running_server() as stopping:
        body = SMALL | {"variants": ["mean"], "lengths": [8, 16], "repeats": 100}
        with stopping.http.stream("POST", SWEEP, json=body) as response:
            events = parse_events(response.iter_lines())
            assert next(events)[0] == "progress"
            stopping.runtime.worker.shared_state.drain()
            *_, (name, what) = events
        assert name == "error"
        assert what["problem"]["type"] == "urn:qkv:problem:service-unavailable"
        response = stopping.http.post(SWEEP, json=body)
        assert assert_problem(response, 503)["detail"] == what["problem"]["detail"]
        assert int(response.headers["retry-after"]) > 0
        assert response.headers["connection"] == "close"


def test_long_cell_ends_with_the_drain_timeout(command: Callable[..., Process]) -> None:
    """The client gets an error event."""
    process = command("serve", "--port", "0", "--workers", "1", QKV_DRAIN_S="0")
    body = {"variants": ["softmax"], "lengths": [12288], "repeats": 100}
    with httpx.stream("POST", f"{process.url}{SWEEP}", json=body, timeout=TIMEOUT_S) as response:
        events = parse_events(response.iter_lines())
        assert next(events)[0] == "progress"
        time.sleep(0.5)  # until its inputs are drawn, and its first run has started
        process.popen.send_signal(signal.SIGTERM)
        *_, (name, what) = events
    assert name == "error"
    assert what["problem"]["type"] == "urn:qkv:problem:service-unavailable"
    process.wait()
    assert not [line for line in process.lines if "Traceback" in line]


def test_device_process_sweeps(command: Callable[..., Process]) -> None:
    process = command(
        "serve", "--port", "0", "--workers", "2", QKV_DEVICE_PROCESS="one",
        QKV_MAX_QUEUE_BYTES=str(64 << 20),
    )  # fmt: skip
    body = SMALL | {"variants": ["linear", "mean"], "lengths": [16, 64]}
    with httpx.stream("POST", f"{process.url}{SWEEP}", json=body, timeout=TIMEOUT_S) as response:
        events = list(parse_events(response.iter_lines()))
    assert [name for name, _ in events] == ["progress", "cell"] * 4 + ["done"]
    assert all(what.keys() == CELL for name, what in events if name == "cell")
    assert process.end() == 0, process.lines


def test_documented_example_runs(url: str) -> None:
    page = (ROOT / "docs/http.md").read_text()
    (command,) = re.findall(r"^curl -N .*?^}'$", page, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["bash", "-c", command.replace("http://127.0.0.1:8000", url).replace("curl ", "curl -sS ")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [name for name, _ in parse_events(iter(done.stdout.split("\n")))][-1] == "done"
