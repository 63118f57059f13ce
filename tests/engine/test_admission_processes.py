"""Faults, leavers and bounds where the service has processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from test_device_process import device_process
from test_supervisor import address, ask, big, children

from conftest import PATIENCE, Process, until
from support import failing_device as faulty
from support.known_requests import refused
from support.paths import ROOT
from support.small_requests import HEAD, SAFETENSORS, body, outputs, post


@pytest.fixture(params=["each", "one"])
def fleet(request: pytest.FixtureRequest, command: Callable[..., Process]) -> Process:
    """Two workers, each with its device or with one for both, which fail when asked to."""
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = command(
        "serve", "--port", "0", "--workers", "2",
        module="support.failing_device", QKV_DEVICE_PROCESS=request.param, QKV_MAX_BATCH="32",
        PYTHONPATH=os.pathsep.join(paths),
    )  # fmt: skip
    assert process.url
    return process


def test_a_process_with_a_broken_device_is_replaced(fleet: Process) -> None:
    before = set(children(fleet.popen.pid))
    good = outputs(post(fleet.url, body()))
    time.sleep(1.1)  # one that ends within its first second is replaced a second later
    refused(post(fleet.url, body(faulty.STICKY)), 503)
    until(lambda: before - set(children(fleet.popen.pid)) != set())
    until(lambda: ask(fleet.url, "/readyz") == 200)
    after = set(children(fleet.popen.pid))
    assert len(after) == len(before)
    assert len(before - after) == 1
    assert any("starting another" in line for line in fleet.lines)
    for _ in range(8):
        assert outputs(post(fleet.url, body())) == good
    assert fleet.end() == 0


def test_poison_and_greed_hurt_nobody_else(fleet: Process) -> None:
    good = outputs(post(fleet.url, body()))
    bodies = [body(), body(faulty.POISON), body(), body(faulty.GREEDY)] * 8
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda content: post(fleet.url, content), bodies))
    for i, response in enumerate(answers):
        assert response.status_code == (500 if i % 4 == 1 else 200)
        assert i % 2 or outputs(response) == good
    assert ask(fleet.url, "/readyz") == 200
    assert fleet.end() == 0


def test_two_hundred_leavers_of_a_device_process(command: Callable[..., Process]) -> None:
    """Its device is busy with one that is large while they come and go."""
    fleet = command(
        "serve", "--port", "0", "--workers", "2",
        QKV_DEVICE_PROCESS="one", QKV_MAX_BATCH="32",
    )  # fmt: skip
    content, large, device = body(), big(16384, 16), device_process(fleet)
    head = f"{HEAD}Content-Type: {SAFETENSORS['Content-Type']}\r\nContent-Length: {len(content)}"

    def count() -> int:
        (found,) = httpx.get(f"{fleet.url}/v2/models/softmax/stats").json()["model_stats"]
        return int(found["inference_count"])

    def said(name: str) -> float:
        page = httpx.get(f"{fleet.url}/metrics", timeout=PATIENCE).text
        return sum(float(n) for n in re.findall(rf"^{name}(?:{{.*}})? (.*)$", page, re.MULTILINE))

    def ticks() -> int:
        return sum(
            map(int, Path(f"/proc/{device}/stat").read_text().rsplit(")")[-1].split()[11:13])
        )

    before = count()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(post, fleet.url, large)
        until(lambda: said("qkv_request_body_bytes_total") >= len(large))
        begun = ticks()
        until(lambda: ticks() > begun + 50)  # nothing but the large one computes for that long
        with ExitStack() as stack:
            for _ in range(200):
                leaving = stack.enter_context(socket.create_connection(address(fleet), PATIENCE))
                leaving.sendall(head.encode() + b"\r\n\r\n" + content)
            until(lambda: said("qkv_queue_depth") == 200)
        until(lambda: said("qkv_queue_depth") == 0)
        assert not busy.done(), "the machine is too fast for this test"
        assert busy.result(PATIENCE).is_success
    assert post(fleet.url, content).is_success
    assert count() - before == 2


def test_with_a_stopped_device_process_the_bound_holds_too(command: Callable[..., Process]) -> None:
    fleet = command(
        "serve", "--port", "0", "--workers", "1", QKV_DEVICE_PROCESS="one", QKV_MAX_QUEUE="4"
    )
    assert post(fleet.url, body()).is_success
    device = device_process(fleet)
    os.kill(device, signal.SIGSTOP)
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(post, fleet.url, body()) for _ in range(10)]
        until(lambda: sum(future.done() for future in asked) == 6)
        os.kill(device, signal.SIGCONT)
        statuses = sorted(future.result(PATIENCE).status_code for future in asked)
    assert statuses == [200] * 4 + [503] * 6
    assert json.loads(httpx.get(f"{fleet.url}/readyz").content) == {"status": "ok"}
