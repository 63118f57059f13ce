"""Device errors, disconnects and limits of a service with several processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import pytest

from support import failing_device
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import (
    address,
    device_process_pid,
    status_of,
)
from support.small_requests import HEAD, SAFETENSORS, body, outputs, post

TESTS: Final = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(params=["each", "one"])
def service_process(request: pytest.FixtureRequest, command: Callable[..., Process]) -> Process:
    """Two workers, with and without a device process, on a device that fails on request."""
    process = command(
        "serve", "--port", "0", "--workers", "2",
        module="support.faulty_service", QKV_DEVICE_PROCESS=request.param, QKV_MAX_BATCH="32",
        PYTHONPATH=TESTS,
    )  # fmt: skip
    assert process.url
    return process


def test_failing_and_oversized_requests_affect_no_others(service_process: Process) -> None:
    good = outputs(post(service_process.url, body()))
    bodies = [body(), body(failing_device.POISON), body(), body(failing_device.GREEDY)] * 8
    with ThreadPoolExecutor(32) as pool:
        responses = list(pool.map(lambda content: post(service_process.url, content), bodies))
    for i, response in enumerate(responses):
        assert response.status_code == (500 if i % 4 == 1 else 200)
        assert i % 2 or outputs(response) == good
    assert status_of(service_process.url, "/readyz") == 200
    assert service_process.end() == 0


def test_device_process_drops_jobs_of_200_disconnected_clients(
    command: Callable[..., Process], tmp_path: Path
) -> None:
    """Two hundred clients disconnect while the device runs another request."""
    gate, content = tmp_path / "gate", body()
    service_process = command(
        "serve", "--port", "0", "--workers", "2",
        module="support.faulty_service", QKV_DEVICE_PROCESS="one", QKV_MAX_BATCH="32",
        PYTHONPATH=TESTS, GATE=str(gate),
    )  # fmt: skip
    head = f"{HEAD}Content-Type: {SAFETENSORS['Content-Type']}\r\nContent-Length: {len(content)}"

    def count() -> int:
        (found,) = httpx.get(f"{service_process.url}/v2/models/softmax/stats").json()["model_stats"]
        return int(found["inference_count"])

    def metric(name: str) -> float:
        page = httpx.get(f"{service_process.url}/metrics", timeout=TIMEOUT_S).text
        return sum(float(n) for n in re.findall(rf"^{name}(?:{{.*}})? (.*)$", page, re.MULTILINE))

    before = count()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(post, service_process.url, body(failing_device.WAITING))
        wait_until(gate.exists)
        with ExitStack() as stack:
            for _ in range(200):
                connection = stack.enter_context(
                    socket.create_connection(address(service_process), TIMEOUT_S)
                )
                connection.sendall(head.encode() + b"\r\n\r\n" + content)
            wait_until(lambda: metric("qkv_queue_depth") == 200)
        wait_until(lambda: metric("qkv_queue_depth") == 0)
        gate.unlink()
        assert busy.result(TIMEOUT_S).is_success
    assert post(service_process.url, content).is_success
    assert count() - before == 2


def test_queue_limit_holds_while_the_device_process_is_stopped(
    command: Callable[..., Process],
) -> None:
    service_process = command(
        "serve", "--port", "0", "--workers", "1", QKV_DEVICE_PROCESS="one", QKV_MAX_QUEUE="4"
    )
    assert post(service_process.url, body()).is_success
    device = device_process_pid(service_process)
    os.kill(device, signal.SIGSTOP)
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(post, service_process.url, body()) for _ in range(10)]
        wait_until(lambda: sum(future.done() for future in futures) == 6)
        os.kill(device, signal.SIGCONT)
        statuses = sorted(future.result(TIMEOUT_S).status_code for future in futures)
    assert statuses == [200] * 4 + [503] * 6
    assert json.loads(httpx.get(f"{service_process.url}/readyz").content) == {"status": "ok"}
