"""Supervisor and workers: killed, stuck and stopping processes, with real sockets and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
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
    is_alive,
    refuses_connections,
    repeat_in_threads,
    slow_request_body,
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
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "by SIGKILL, perhaps out of memory,"),
        (signal.SIGSEGV, "by SIGSEGV"),
        (signal.SIGTERM, "with status 0"),
    ],
)
def test_exit_of_a_worker_is_logged_with_its_signal(
    command: Command, log: str, number: signal.Signals, reason: str
) -> None:
    """As a line with time and level, or as JSON where requests are logged as JSON."""
    service = command("serve", "--port", "0", "--workers", "1", QKV_REQUEST_LOG=log)
    assert service.url
    os.kill(child_pids(service.popen.pid)[0], number)
    wait_until(lambda: "restarting" in service.lines[-1])
    line = service.lines[-1]
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


def wait_until_replaced(service_process: Process, victim: int) -> None:
    """Waits until all workers are ready without the victim."""
    wait_until(
        lambda: (
            len(now := child_pids(service_process.popen.pid)) == WORKERS
            and victim not in now
            and status_of(service_process.url, "/readyz") == 200
        )
    )


def test_killed_worker_is_restarted_and_the_port_accepts_throughout(
    service_process: Process,
) -> None:
    clients = [httpx.Client(base_url=service_process.url, timeout=TIMEOUT_S) for _ in range(8)]

    def once(index: int) -> int | type[Exception]:
        try:
            return clients[index].post(PATH, content=TINY_BODY, headers=JSON).status_code
        except httpx.TransportError as error:
            return type(error)

    time.sleep(1.1)  # a process that exits within its first second is restarted a second later
    with repeat_in_threads(8, once) as seen:
        wait_until(lambda: len(seen) > 200)
        before = child_pids(service_process.popen.pid)
        os.kill(before[0], signal.SIGKILL)
        wait_until_replaced(service_process, before[0])
        count = len(seen)
        wait_until(lambda: len(seen) > count + 200)
    for client in clients:
        client.close()
    counts = Counter(seen)
    connection_errors = {
        httpx.RemoteProtocolError,
        httpx.ReadError,
        httpx.WriteError,
    }  # on connections of the killed worker
    assert set(counts) <= {200} | connection_errors, counts
    assert sum(n for what, n in counts.items() if what != 200) <= 8, counts


def test_retrying_clients_get_right_outputs_when_workers_are_killed(
    service_process: Process,
) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {n: draw.normal(size=(2, 4, 8)) for n in ("query", "key", "value")}
    with qkv.Client(service_process.url, retries=3) as client:
        expected = client.attend("softmax", **arrays).output
    clients = [qkv.Client(service_process.url, retries=3) for _ in range(8)]

    def once(index: int) -> bool:
        return bool((clients[index].attend("softmax", **arrays).output == expected).all())

    with repeat_in_threads(8, once) as seen:
        for _ in range(2):
            wait_until(lambda: len(seen) > 100)
            time.sleep(1.1)
            victim = child_pids(service_process.popen.pid)[0]
            os.kill(victim, signal.SIGKILL)
            wait_until_replaced(service_process, victim)
            seen.append(True)
    assert all(seen)
    for client in clients:
        client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_partially_received_requests_are_completed_after_a_stop_signal(
    service_process: Process, number: int
) -> None:
    """Head and part of the body of a slow upload arrive before it."""
    host, port = address(service_process)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(TINY_BODY)}\r\n"
    uploads = [socket.create_connection((host, port), TIMEOUT_S) for _ in range(9)]
    for upload in uploads:
        upload.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        upload.sendall(TINY_BODY[:20])
    supervisor = service_process.popen.pid
    reached = [supervisor]
    if number == signal.SIGHUP:  # a closing terminal sends it to every process, its shell again
        reached = [*child_pids(supervisor), supervisor] * 2
    for pid in reached:
        os.kill(pid, number)
    wait_until(lambda: refuses_connections(host, port))
    for upload in uploads:
        upload.sendall(TINY_BODY[20:])
        response = b""
        while more := upload.recv(4096):
            response += more
        assert response.startswith(b"HTTP/1.1 200 ")
        assert json.loads(response.partition(b"\r\n\r\n")[2])["outputs"]["output"]
        upload.close()
    assert service_process.wait() == 0


def test_sigterm_resets_no_new_connection(service_process: Process) -> None:
    """Sends each request on a new connection, so that some are always in the backlog."""
    host, port = address(service_process)
    assert_problem = threading.Event()

    def once(_: int) -> int | OSError | None:
        if assert_problem.is_set():
            return None
        try:
            connection = socket.create_connection((host, port), TIMEOUT_S)
        except ConnectionRefusedError:
            assert_problem.set()
            return None
        with connection:
            request = RawRequest(connection, TINY_BODY, JSON)
        return request.error or request.status * request.whole

    with repeat_in_threads(32, once) as seen:
        wait_until(lambda: len(seen) > 1000)
        before = len(seen)
        service_process.popen.send_signal(signal.SIGTERM)
        assert assert_problem.wait(TIMEOUT_S)
    assert set(seen[:before]) == {200}
    counts = Counter(response for response in seen if response is not None)
    assert set(counts) == {200}, counts
    assert service_process.wait() == 0


@pytest.mark.representative
def test_sigterm_under_load_responds_on_all_connections(
    service_process: Process,
) -> None:
    """Two hundred clients send small and slow requests until a response closes the connection."""
    host, port = address(service_process)
    bodies = [
        (TINY_BODY, JSON),
        (slow_request_body(256), SAFETENSORS),
        (slow_request_body(1024), SAFETENSORS),
    ]
    seen = list[int | OSError]()
    served = set[int]()  # a connection that no worker has accepted may get 503

    def keep_sending(index: int) -> None:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            while True:
                request = RawRequest(connection, *bodies[index % len(bodies)])
                served.add(index)
                seen.append(request.error or request.status * request.whole)
                if request.error or request.closing or not request.status:
                    return

    def keep_connecting(index: int) -> int | OSError:
        """Sends invalid requests, with pauses; returns the last status."""
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            while True:
                request = RawRequest(connection, b"", JSON)
                served.add(200 + index)
                if request.error or request.closing or not request.status:
                    return request.error or request.status * request.whole
                time.sleep(0.01)

    with ThreadPoolExecutor(216) as pool:
        loops = [pool.submit(keep_sending, index) for index in range(200)]
        connections = [pool.submit(keep_connecting, index) for index in range(16)]
        wait_until(lambda: len(seen) > 400 and len(served) == 216)
        service_process.popen.send_signal(signal.SIGTERM)
        for loop in loops:
            loop.result(TIMEOUT_S)
        last = Counter(knock.result(TIMEOUT_S) for knock in connections)
    # no client finds its connection closed: a response with "Connection: close" comes before
    assert set(last) == {400}, last
    assert set(seen) == {200}, Counter(seen)
    assert service_process.wait() == 0


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


def test_second_sigterm_exits_at_once(service_process: Process) -> None:
    workers = child_pids(service_process.popen.pid)
    host, port = address(service_process)
    with socket.create_connection((host, port), TIMEOUT_S) as upload:  # keeps a worker from exiting
        upload.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode())
        upload.sendall(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        service_process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(host, port))
        assert service_process.popen.poll() is None
        started_at = time.monotonic()
        assert service_process.end(signal.SIGTERM) not in (0, -signal.SIGTERM)
        assert (
            time.monotonic() - started_at < 10
        )  # of the 30 seconds that the drain allows the upload
    wait_until(lambda: not any(map(is_alive, workers)))


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


def test_sigterm_before_ready_exits_cleanly(command: Command) -> None:
    """Tests signals between the fork and the workers' own signal handlers too."""
    for wait_s in (0.0, 0.02, 0.2):
        started = command("serve", "--port", "0", "--workers", "3")
        wait_until(lambda started=started: len(child_pids(started.popen.pid)) == 3)  # type: ignore[misc]
        time.sleep(wait_s)
        started_at = time.monotonic()
        assert started.end() == 0
        assert time.monotonic() - started_at < 20  # of the 30 seconds of the drain
        assert not any("Traceback" in line for line in started.lines), started.lines


def test_sigterm_while_a_worker_restarts_exits_cleanly(service_process: Process) -> None:
    before = child_pids(service_process.popen.pid)
    time.sleep(1.1)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: bool(set(child_pids(service_process.popen.pid)) - set(before)))
    started_at = time.monotonic()
    assert service_process.end() == 0
    assert time.monotonic() - started_at < 20


def test_workers_exit_after_the_supervisor(service_process: Process) -> None:
    workers = child_pids(service_process.popen.pid)
    host, port = address(service_process)
    service_process.popen.kill()
    wait_until(lambda: not any(map(is_alive, workers)))
    assert refuses_connections(host, port)


def test_livez_fails_while_a_worker_is_stuck(command: Command) -> None:
    service_process = command("serve", "--port", "0", "--workers", "3", QKV_STUCK_S="1")
    assert status_of(service_process.url, "/livez") == 200
    victim = child_pids(service_process.popen.pid)[0]
    os.kill(victim, signal.SIGSTOP)
    try:
        # a connection of the stopped worker gets no response: 0
        wait_until(lambda: status_of(service_process.url, "/livez") == 503)
    finally:
        os.kill(victim, signal.SIGCONT)
    wait_until(lambda: status_of(service_process.url, "/livez") == 200)
    assert service_process.end() == 0


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
    links = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
    return {str(link) for link in links if str(link).startswith("socket:")}


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
