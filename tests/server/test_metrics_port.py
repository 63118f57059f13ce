"""`QKV_METRICS_PORT` has the metrics alone, without a key, as long as any worker lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner

from qkv.cli.main import main
from support.known_requests import assert_problem
from support.ports import free_port
from support.processes import Process, wait_until
from support.service_processes import TINY_BODY, child_pids, refuses_connections, status_of

Command = Callable[..., Process]
KEY = "a-key-0123456789"


def start(command: Command, workers: int) -> tuple[Process, str]:
    """Returns a service with a key, and the address of its metrics."""
    port = free_port()
    started = command(
        *("serve", "--port", "0", "--workers", str(workers)),
        QKV_METRICS_PORT=str(port),
        QKV_API_KEYS=KEY,
    )
    assert started.url
    return started, f"http://127.0.0.1:{port}"


@pytest.mark.representative
def test_metrics_port_has_metrics_alone_without_a_key(command: Command) -> None:
    started, metrics = start(command, 2)
    run = httpx.post(
        f"{started.url}/v1/attention/softmax",
        content=TINY_BODY,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    assert run.status_code == 200
    text = httpx.get(f"{metrics}/metrics").text
    assert 'qkv_requests_total{outcome="ok",variant="softmax"} 1.0\n' in text
    assert "qkv_workers_ready 2.0\n" in text
    for path in ("/", "/docs", "/livez", "/v1/variants", "/v1/attention/softmax", "/metrics/"):
        assert_problem(httpx.get(metrics + path), 404)
    assert_problem(httpx.post(f"{metrics}/metrics"), 405)
    assert status_of(started.url, "/metrics") == 401
    (line,) = (line for line in started.lines if line.startswith("curl "))
    assert '-H "Authorization: Bearer $QKV_API_KEY"' in line
    assert not any(KEY in line for line in started.lines)
    assert started.end() == 0
    assert refuses_connections("127.0.0.1", int(metrics.rpartition(":")[2]))


def test_metrics_survive_each_worker(command: Command) -> None:
    started, metrics = start(command, 2)
    killed: set[int] = set()
    for index in range(2):
        victim = child_pids(started.popen.pid)[index]
        killed.add(victim)
        os.kill(victim, signal.SIGKILL)
        assert httpx.get(f"{metrics}/metrics", timeout=30).status_code == 200
        wait_until(lambda: not killed & set(child_pids(started.popen.pid)))
        wait_until(lambda: status_of(started.url, "/readyz") == 200)
        assert "qkv_workers_ready 2.0\n" in httpx.get(f"{metrics}/metrics").text


def test_metrics_are_counted_with_device_processes(command: Command) -> None:
    port = free_port()
    started = command(
        *("serve", "--port", "0", "--workers", "2"),
        QKV_METRICS_PORT=str(port), QKV_DEVICE_PROCESS="one",
    )  # fmt: skip
    assert started.url
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'qkv_device_process_up{device="cpu",process="0"} 1.0\n' in text
    assert started.end() == 0


def test_port_that_does_not_exist_is_an_error() -> None:
    result = CliRunner().invoke(main, ["serve"], env={"QKV_METRICS_PORT": "70000"})
    assert result.exit_code == 1
    assert "QKV_METRICS_PORT" in result.output
