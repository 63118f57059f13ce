"""Several processes on one port: what becomes of requests when one dies, hangs or all are told to
stop. Real processes, sockets and signals."""

from __future__ import annotations

import json
import os
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
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
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


def test_it_is_ready_when_all_workers_are(service_process: Process) -> None:
    assert any(f"{WORKERS} workers" in line for line in service_process.lines)
    assert len(child_pids(service_process.popen.pid)) == WORKERS
    assert [status_of(service_process.url, p) for p in ("/readyz", "/livez")] == [200, 200]
    assert service_process.end() == 0
    assert service_process.is_serving  # nothing said after it


def test_workers_from_the_environment_and_the_flag_before_it(command: Command) -> None:
    for arguments, count in (((), 2), (("--workers", "1"), 1)):
        started = command("serve", "--port", "0", *arguments, QKV_WORKERS="2")
        assert started.url
        assert len(child_pids(started.popen.pid)) == count


def replaced(service_process: Process, victim: int) -> float:
    """Seconds until there are as many workers as before, and all ready."""
    begun = time.monotonic()
    wait_until(
        lambda: (
            len(now := child_pids(service_process.popen.pid)) == WORKERS
            and victim not in now
            and status_of(service_process.url, "/readyz") == 200
        )
    )
    return time.monotonic() - begun


def test_a_killed_worker_is_replaced_and_the_port_never_refuses(service_process: Process) -> None:
    clients = [httpx.Client(base_url=service_process.url, timeout=TIMEOUT_S) for _ in range(8)]

    def once(index: int) -> int | type[Exception]:
        try:
            return clients[index].post(PATH, content=TINY_BODY, headers=JSON).status_code
        except httpx.TransportError as error:
            return type(error)

    time.sleep(1.1)  # past the second in which a death counts as one at birth
    with repeat_in_threads(8, once) as seen:
        wait_until(lambda: len(seen) > 200)
        before = child_pids(service_process.popen.pid)
        begun = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: bool(set(child_pids(service_process.popen.pid)) - set(before)))
        assert time.monotonic() - begun < 1  # the bound
        took = replaced(service_process, before[0])
        count = len(seen)
        wait_until(lambda: len(seen) > count + 200)
    for client in clients:
        client.close()
    counts = Counter(seen)
    lost = {httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError}  # on the dead connections
    assert set(counts) <= {200} | lost, counts
    assert sum(n for what, n in counts.items() if what != 200) <= 8, counts
    assert took < TIMEOUT_S


def test_clients_that_retry_lose_nothing_when_workers_are_killed(service_process: Process) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {n: draw.normal(size=(2, 4, 8)) for n in ("query", "key", "value")}
    with qkv.Client(service_process.url, retries=3) as client:
        wanted = client.attend("softmax", **arrays).output
    clients = [qkv.Client(service_process.url, retries=3) for _ in range(8)]

    def once(index: int) -> bool:
        return bool((clients[index].attend("softmax", **arrays).output == wanted).all())

    with repeat_in_threads(8, once) as seen:
        for _ in range(2):
            wait_until(lambda: len(seen) > 100)
            time.sleep(1.1)
            victim = child_pids(service_process.popen.pid)[0]
            os.kill(victim, signal.SIGKILL)
            replaced(service_process, victim)
            seen.append(True)
    assert all(seen)
    for client in clients:
        client.close()


def test_what_its_workers_have_begun_to_read_is_still_answered(service_process: Process) -> None:
    """A slow upload whose head, and a part of the body, came before SIGTERM."""
    host, port = address(service_process)
    head = f"POST {PATH} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(TINY_BODY)}\r\n"
    uploads = [socket.create_connection((host, port), TIMEOUT_S) for _ in range(9)]
    for upload in uploads:
        upload.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        upload.sendall(TINY_BODY[:20])
    service_process.popen.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses_connections(host, port))
    for upload in uploads:
        upload.sendall(TINY_BODY[20:])
        answer = b""
        while more := upload.recv(4096):
            answer += more
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"]["output"]
        upload.close()
    assert service_process.wait() == 0


def test_sigterm_in_a_storm_of_new_connections_resets_none(service_process: Process) -> None:
    """Each request on a connection of its own, so that some always wait to be accepted."""
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
            asked = RawRequest(connection, TINY_BODY, JSON)
        return asked.error or asked.status * asked.whole

    with repeat_in_threads(32, once) as seen:
        wait_until(lambda: len(seen) > 1000)
        before = len(seen)
        service_process.popen.send_signal(signal.SIGTERM)
        assert assert_problem.wait(TIMEOUT_S)
    assert set(seen[:before]) == {200}
    counts = Counter(answer for answer in seen if answer is not None)
    assert set(counts) == {200, 503}, counts
    assert service_process.wait() == 0


def test_sigterm_under_load_answers_all_that_comes_on_kept_connections(
    service_process: Process,
) -> None:
    """Two hundred in flight, small ones and ones that take a while; each client goes on until it
    is told that its connection closes."""
    host, port = address(service_process)
    bodies = [
        (TINY_BODY, JSON),
        (slow_request_body(256), SAFETENSORS),
        (slow_request_body(1024), SAFETENSORS),
    ]
    seen = list[int | OSError]()

    def keep_asking(index: int) -> None:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            while True:
                asked = RawRequest(connection, *bodies[index % len(bodies)])
                seen.append(asked.error or asked.status * asked.whole)
                if asked.error or asked.closing or not asked.status:
                    return

    def keep_connecting(_: int) -> int | OSError:
        """Asks what is answered at once, whatever waits; the last answer."""
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            while True:
                asked = RawRequest(connection, b"", JSON)
                if asked.error or asked.closing or not asked.status:
                    return asked.error or asked.status * asked.whole
                time.sleep(0.01)

    with ThreadPoolExecutor(216) as pool:
        loops = [pool.submit(keep_asking, index) for index in range(200)]
        connections = [pool.submit(keep_connecting, index) for index in range(16)]
        wait_until(lambda: len(seen) > 400)
        service_process.popen.send_signal(signal.SIGTERM)
        for loop in loops:
            loop.result(TIMEOUT_S)
        last = Counter(knock.result(TIMEOUT_S) for knock in connections)
    # who is told to close with its 200 never hears 503; those between two requests do, for the
    # empty body is 400 before
    assert set(last) <= {400, 503}, last
    assert last[503]
    counts = Counter(seen) + Counter({503: last[503]})
    assert set(counts) == {200, 503}, counts
    assert counts[200] > 400
    assert service_process.wait() == 0


def test_a_second_sigterm_ends_it_at_once(service_process: Process) -> None:
    workers = child_pids(service_process.popen.pid)
    host, port = address(service_process)
    with socket.create_connection((host, port), TIMEOUT_S) as upload:  # holds a worker
        upload.sendall(f"POST {PATH} HTTP/1.1\r\nHost: here\r\n".encode())
        upload.sendall(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        service_process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(host, port))
        assert service_process.popen.poll() is None
        begun = time.monotonic()
        assert service_process.end(signal.SIGTERM) not in (0, -signal.SIGTERM)
        assert time.monotonic() - begun < 10  # of the 30 that the upload would have had
    wait_until(lambda: not any(map(is_alive, workers)))


def test_sigterm_before_it_is_ready_ends_it_well(command: Command) -> None:
    """Also one that meets the workers between fork and their own handling of signals."""
    for patience in (0.0, 0.02, 0.2):
        started = command("serve", "--port", "0", "--workers", "3")
        wait_until(lambda started=started: len(child_pids(started.popen.pid)) == 3)  # type: ignore[misc]
        time.sleep(patience)
        begun = time.monotonic()
        assert started.end() == 0
        assert time.monotonic() - begun < 20  # of the 30 seconds that draining may take
        assert not any("Traceback" in line for line in started.lines), started.lines


def test_sigterm_while_a_worker_is_born_anew(service_process: Process) -> None:
    before = child_pids(service_process.popen.pid)
    time.sleep(1.1)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: bool(set(child_pids(service_process.popen.pid)) - set(before)))
    begun = time.monotonic()
    assert service_process.end() == 0
    assert time.monotonic() - begun < 20


def test_workers_end_by_themselves_when_their_parent_is_gone(service_process: Process) -> None:
    workers = child_pids(service_process.popen.pid)
    host, port = address(service_process)
    service_process.popen.kill()
    wait_until(lambda: not any(map(is_alive, workers)))
    assert refuses_connections(host, port)


def test_a_stuck_worker_turns_livez_red(command: Command) -> None:
    service_process = command("serve", "--port", "0", "--workers", "3", QKV_STUCK_S="1")
    assert status_of(service_process.url, "/livez") == 200
    victim = child_pids(service_process.popen.pid)[0]
    os.kill(victim, signal.SIGSTOP)
    try:
        # one that lands at the stopped worker waits in vain: 0
        wait_until(lambda: status_of(service_process.url, "/livez") == 503)
    finally:
        os.kill(victim, signal.SIGCONT)
    wait_until(lambda: status_of(service_process.url, "/livez") == 200)
    assert service_process.end() == 0


def test_where_the_only_worker_hangs_the_parent_answers(command: Command) -> None:
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


def test_a_taken_port_is_one_line(command: Command, server: Server) -> None:
    failed = command("serve", "--port", str(server.address[1]), "--workers", "3")
    assert failed.wait() != 0
    (line,) = failed.lines
    assert str(server.address[1]) in line


def test_the_number_of_workers_changes_no_bits(shared_process: Callable[..., Process]) -> None:
    cases = [random_case(kind, seed) for kind in range(20) for seed in range(3)]
    bodies = [json.dumps(case.document | {"encoding": "base64"}).encode() for case in cases]
    answers = []
    for count in (1, WORKERS):
        url = shared_process("--workers", str(count)).url

        def outputs(body: bytes, url: str = url) -> Any:
            response = httpx.post(url + PATH, content=body, headers=JSON, timeout=TIMEOUT_S)
            assert response.status_code == 200, response.text
            return response.json()["outputs"]

        with ThreadPoolExecutor(8) as pool:
            answers.append(list(pool.map(outputs, bodies)))
    assert answers[0] == answers[1]


def test_what_is_there_before_the_fork_is_never_looked_through_for_garbage() -> None:
    """By no worker: it would stop for a fifth of a second, and copy what it shares."""
    code = """if True:
        import gc, os
        from qkv import settings
        from qkv.server import supervisor
        def work(*_):
            os.write(1, b"%d %d" % (gc.get_freeze_count(), len(gc.get_objects())))
            return 1
        supervisor.run_worker = work
        supervisor.serve(settings.Settings(port=0, workers=1))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False
    )
    frozen, left = map(int, done.stdout.split())
    assert frozen > 100_000  # torch's, most of them
    assert left < 1000


def sockets_of(pid: int) -> set[str]:
    """The sockets that a process has open."""
    links = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
    return {str(link) for link in links if str(link).startswith("socket:")}


def test_connections_that_come_at_once_are_shared_out(service_process: Process) -> None:
    """Whoever is woken first does not take them all; nor does one that hangs keep them waiting."""
    workers = child_pids(service_process.popen.pid)
    before = {pid: len(sockets_of(pid)) for pid in workers}

    def shares() -> list[int]:
        return [len(sockets_of(pid)) - before[pid] for pid in workers]

    with ExitStack() as stack:
        host, port = address(service_process)
        count = 8 * WORKERS
        made = [stack.enter_context(socket.create_connection((host, port))) for _ in range(count)]
        wait_until(lambda: sum(shares()) == count)
        # in turn they would have 8 each; a worker may be late by a turn or two
        assert max(shares()) - min(shares()) <= 6, shares()
        assert all(RawRequest(one, TINY_BODY, JSON).status == 200 for one in made)
        os.kill(workers[0], signal.SIGSTOP)
        try:
            for _ in range(8):
                one = stack.enter_context(socket.create_connection((host, port)))
                assert RawRequest(one, TINY_BODY, JSON).status == 200
        finally:
            os.kill(workers[0], signal.SIGCONT)
