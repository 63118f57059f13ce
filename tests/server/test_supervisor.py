"""Supervisor and workers: killed, stuck and stopping processes, with real sockets and signals."""

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
from datetime import datetime, timedelta
from typing import Any, Final

import httpx
import pytest

from support.known_requests import random_case
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server
from support.service_processes import (
    JSON,
    PATH,
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


def test_exit_of_a_worker_is_logged_with_its_signal(command: Command) -> None:
    """As JSON where requests are logged as JSON; test_faults.py has the lines of text."""
    service = command("serve", "--port", "0", "--workers", "1", QKV_REQUEST_LOG="json")
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
        time_text, level, message = json.loads(line).values()
        assert datetime.fromisoformat(time_text).utcoffset() == timedelta(0)
        assert level == "WARNING"
        assert re.fullmatch(rf"worker 0 exited {reason} after \d+\.\d s; restarting it", message)


def test_ctrl_c_stops_no_worker(service_process: Process) -> None:
    """A terminal sends it to every process; the supervisor drains the workers."""
    workers = child_pids(service_process.popen.pid)
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    time.sleep(1)  # longer than a worker without connections takes to stop
    assert child_pids(service_process.popen.pid) == workers
    assert status_of(service_process.url, "/readyz") == 200
    assert service_process.end(signal.SIGINT) == 0


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


def test_used_port_is_a_one_line_error(command: Command, server: Server) -> None:
    failed = command("serve", "--port", str(server.address[1]), "--workers", "3")
    assert failed.wait() != 0
    (line,) = failed.lines
    assert str(server.address[1]) in line


def test_the_number_of_workers_changes_no_bits(shared_process: Callable[..., Process]) -> None:
    cases = [random_case(kind, 0) for kind in range(20)]
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


def sockets_of(pid: int) -> set[str]:
    """Returns the open sockets of a process."""
    return {file for file in open_files(pid) if file.startswith("socket:")}


def test_simultaneous_connections_are_balanced(service_process: Process) -> None:
    """The service is ready once all workers are. The first to wake does not accept all, and a
    stopped worker blocks none."""
    assert any(f"{WORKERS} workers" in line for line in service_process.lines)
    workers = child_pids(service_process.popen.pid)
    assert len(workers) == WORKERS
    before = {pid: len(sockets_of(pid)) for pid in workers}  # before any connection
    assert [status_of(service_process.url, p) for p in ("/readyz", "/livez")] == [200, 200]

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
    assert service_process.end() == 0
    assert service_process.lines[-1].startswith("curl ")  # it prints nothing after this line
