"""Supervisor and workers: killed, stuck and stopping processes, with real sockets and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv.client.request_builders import build_attend
from support.known_requests import assert_problem, random_case
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server
from support.service_processes import (
    JSON,
    PATH,
    SAFETENSORS,
    TINY_BODY,
    RawRequest,
    address,
    child_pids,
    open_files,
    status_of,
)

WORKERS: Final = 3
Command = Callable[..., Process]


@pytest.fixture
def service_process(command: Command) -> Process:
    started = command("serve", "--port", "0", "--workers", str(WORKERS))
    assert started.url
    return started


@pytest.mark.slow
def test_service_is_ready_when_all_workers_are(service_process: Process) -> None:
    assert any(f"{WORKERS} workers" in line for line in service_process.lines)
    assert len(child_pids(service_process.popen.pid)) == WORKERS
    assert [status_of(service_process.url, p) for p in ("/readyz", "/livez")] == [200, 200]
    assert service_process.end() == 0
    assert service_process.is_serving  # it prints nothing after the curl line


@pytest.mark.parametrize("log", ["off", "json"])
def test_exit_of_a_worker_is_logged_with_its_signal(command: Command, log: str) -> None:
    """As a line with time and level, or as JSON where requests are logged as JSON."""
    service = command("serve", "--port", "0", "--workers", "1", QKV_REQUEST_LOG=log)
    for number, reason in (
        (signal.SIGKILL, "by SIGKILL, perhaps out of memory,"),
        (signal.SIGSEGV, "by SIGSEGV"),
        (signal.SIGTERM, "with status 0"),
    ):
        wait_until(lambda: status_of(service.url, "/readyz") == 200)
        count = len(service.lines)
        os.kill(child_pids(service.popen.pid)[0], number)
        wait_until(lambda count=count: len(service.lines) > count)  # type: ignore[misc]
        (line,) = service.lines[count:]
        if log == "json":
            time_text, level, message = json.loads(line).values()
        else:
            time_text, level, message = line.split(" ", 2)
        assert datetime.fromisoformat(time_text).utcoffset() == timedelta(0)
        assert level == "WARNING"
        assert re.fullmatch(rf"worker 0 exited {reason} after \d+\.\d s; restarting it", message)


def test_workers_flag_overrides_the_environment(command: Command) -> None:
    for arguments, count in (((), 2), (("--workers", "1"), 1)):
        started = command("serve", "--port", "0", *arguments, QKV_WORKERS="2")
        assert started.url
        assert len(child_pids(started.popen.pid)) == count


def test_ctrl_c_stops_no_worker(service_process: Process) -> None:
    """A terminal sends it to every process; the supervisor drains the workers."""
    workers = child_pids(service_process.popen.pid)
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    time.sleep(1)  # longer than a worker without connections takes to stop
    assert child_pids(service_process.popen.pid) == workers
    assert status_of(service_process.url, "/readyz") == 200
    assert service_process.end(signal.SIGINT) == 0


def test_end_of_a_drain_is_no_error(command: Command) -> None:
    """Of clients that send too slowly, or read nothing."""
    started = command("serve", "--port", "0", "--workers", "1", QKV_DRAIN_S="1")
    host, port = address(started)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: ".encode()
    draw = np.random.default_rng(0).normal(size=(1, 8, 1024, 256)).astype(np.float32)
    arrays = dict.fromkeys(("query", "key", "value"), draw)
    body = build_attend("softmax", None, ["output", "weights"], None, arrays).content
    with ExitStack() as stack:
        part, upload, unread = (
            stack.enter_context(socket.create_connection((host, port), TIMEOUT_S)) for _ in range(3)
        )
        lines = f"{len(body)}\r\nContent-Type: {SAFETENSORS['Content-Type']}\r\n\r\n"
        unread.sendall(head + lines.encode() + body)
        assert (first := unread.recv(999))[:12] == b"HTTP/1.1 200", first
        part.sendall(head)
        upload.sendall(head + b"100\r\nExpect: 100-continue\r\n\r\n")
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        started.popen.send_signal(signal.SIGTERM)
        response = b"".join(iter(lambda: upload.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 503 ")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["status"] == 503
    assert started.wait() == 0
    assert [line for line in started.lines if "ERROR" in line] == []


def test_ignored_sighup_stays_ignored(command: Command) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = command("serve", "--port", "0", "--workers", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert started.url
    for pid in (started.popen.pid, *child_pids(started.popen.pid)):
        os.kill(pid, signal.SIGHUP)
    assert started.end() == 0  # after a first stop signal, the second would end it with status 1


def test_supervisor_responds_while_the_only_worker_is_stuck(command: Command) -> None:
    service_process = command("serve", "--port", "0", "--workers", "1", QKV_STUCK_S="1")
    assert status_of(service_process.url, "/livez") == 200
    (victim,) = child_pids(service_process.popen.pid)
    os.kill(victim, signal.SIGSTOP)
    try:
        for method, path in (("GET", "/livez"), ("GET", "/readyz"), ("POST", PATH)):
            response = httpx.request(method, service_process.url + path, timeout=TIMEOUT_S)
            assert_problem(response, 503)
            assert int(response.headers["retry-after"]) > 0
        big_one = httpx.post(
            service_process.url + PATH, content=b"x" * (1 << 24), timeout=TIMEOUT_S
        )
        assert_problem(big_one, 503)
    finally:
        os.kill(victim, signal.SIGCONT)
    wait_until(lambda: status_of(service_process.url, "/livez") == 200)
    assert (
        httpx.post(service_process.url + PATH, content=TINY_BODY, headers=JSON).status_code == 200
    )
    assert service_process.end() == 0


def test_used_port_is_a_one_line_error(command: Command, server: Server) -> None:
    failed = command("serve", "--port", str(server.address[1]), "--workers", "3")
    assert failed.wait() != 0
    (line,) = failed.lines
    assert str(server.address[1]) in line


def test_the_number_of_workers_changes_no_bits(shared_process: Callable[..., Process]) -> None:
    cases = [random_case(kind, seed) for kind in range(20) for seed in range(3)]
    bodies = [json.dumps(case.document | {"encoding": "base64"}).encode() for case in cases]
    responses = []
    for count in (1, WORKERS):
        url = shared_process("--workers", str(count)).url

        def outputs(body: bytes, url: str = url) -> Any:
            response = httpx.post(url + PATH, content=body, headers=JSON, timeout=TIMEOUT_S)
            assert response.status_code == 200, response.text
            return response.json()["outputs"]

        with ThreadPoolExecutor(8) as pool:
            responses.append(list(pool.map(outputs, bodies)))
    assert responses[0] == responses[1]


@pytest.mark.process
def test_objects_before_the_fork_are_frozen_for_gc() -> None:
    """A full collection would stop a worker for a fifth of a second, and copy shared pages."""
    code = """if True:
        import gc, os
        from qkv import settings
        from qkv.server import startup, supervisor
        def work(*_):
            os.write(1, b"%d %d" % (gc.get_freeze_count(), len(gc.get_objects())))
            return 1
        supervisor.run_worker = work
        startup.serve(settings.Settings(port=0, workers=1))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False
    )
    frozen, collectable = map(int, done.stdout.split())
    assert frozen > 100_000  # most are torch's
    assert collectable < 1000


def sockets_of(pid: int) -> set[str]:
    """Returns the open sockets of a process."""
    return {file for file in open_files(pid) if file.startswith("socket:")}


def test_simultaneous_connections_are_balanced(service_process: Process) -> None:
    """The first worker to wake does not accept all, and a stopped worker blocks none."""
    workers = child_pids(service_process.popen.pid)
    before = {pid: len(sockets_of(pid)) for pid in workers}

    def shares() -> list[int]:
        return [len(sockets_of(pid)) - before[pid] for pid in workers]

    with ExitStack() as stack:
        host, port = address(service_process)
        count = 8 * WORKERS
        opened = [stack.enter_context(socket.create_connection((host, port))) for _ in range(count)]
        wait_until(lambda: sum(shares()) == count)
        # an even share is 8 each; a worker may be late by one or two
        assert max(shares()) - min(shares()) <= 6, shares()
        assert all(RawRequest(one, TINY_BODY, JSON).status == 200 for one in opened)
        os.kill(workers[0], signal.SIGSTOP)
        try:
            for _ in range(8):
                one = stack.enter_context(socket.create_connection((host, port)))
                assert RawRequest(one, TINY_BODY, JSON).status == 200
        finally:
            os.kill(workers[0], signal.SIGCONT)
