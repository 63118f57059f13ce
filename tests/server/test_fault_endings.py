"""How a service of each topology ends: by signals at any moment, and by the death of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from support.faulty_processes import TOPOLOGIES, Service, Topology, watch
from support.ports import free_port
from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import (
    JSON,
    PATH,
    SAFETENSORS,
    TINY_BODY,
    RawRequest,
    address,
    is_alive,
    refuses_connections,
    slow_request_body,
)

Start = Callable[[Topology], Service]
CONNECTIONS: Final = 24
BODIES: Final = ((TINY_BODY, JSON), (slow_request_body(256), SAFETENSORS))
each_topology = pytest.mark.parametrize(
    "topology", TOPOLOGIES.values(), ids=[name.replace(" ", "_") for name in TOPOLOGIES]
)


@pytest.fixture
def start(command: Callable[..., Process], tmp_path: Path) -> Start:
    """Starts the service of a topology, which may drain for an hour."""
    return lambda topology: Service(command, topology, tmp_path / "broken", stuck_s=60)


@contextmanager
def answered_connections(service: Service) -> Iterator[None]:
    """Sends requests on many connections; all are answered until the service says that it ends.

    A third of the clients open a connection for each request, until none is accepted.
    """
    host_and_port, seen = address(service.process), Counter[int | OSError]()

    def send(connection: socket.socket, index: int) -> RawRequest:
        request = RawRequest(connection, *BODIES[index % len(BODIES)])
        seen[request.error or request.status * request.whole] += 1
        return request

    def keep_sending(index: int) -> None:
        with socket.create_connection(host_and_port, TIMEOUT_S) as connection:
            while (sent := send(connection, index)).status and not sent.closing:
                continue

    def keep_connecting(index: int) -> None:
        while True:
            try:
                connection = socket.create_connection(host_and_port, TIMEOUT_S)
            except ConnectionRefusedError:
                return
            with connection:
                send(connection, index)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        loops = [
            pool.submit(keep_sending if index % 3 else keep_connecting, index)
            for index in range(CONNECTIONS)
        ]
        wait_until(lambda: seen.total() > 3 * CONNECTIONS)
        yield
        for loop in loops:
            loop.result(TIMEOUT_S)
    assert seen.keys() == {200}, seen


@contextmanager
def unfinished_upload(service: Service) -> Iterator[socket.socket]:
    """Sends a part of a request, for whose rest a service that drains waits."""
    with socket.create_connection(address(service.process), TIMEOUT_S) as upload:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(TINY_BODY)}\r\n"
        upload.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        upload.sendall(TINY_BODY[:20])
        yield upload


def finish(upload: socket.socket) -> None:
    """Sends the rest of a request, which is served."""
    upload.sendall(TINY_BODY[20:])
    received = b""
    while more := upload.recv(4096):
        received += more
    assert received.startswith(b"HTTP/1.1 200 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["outputs"]["output"]


@dataclass(frozen=True)
class Ending:
    """A row of the table of endings.

    Attributes:
        name: what happens to the service.
        make: makes it happen to a service that starts.
        status: exit status of the supervisor.
        log: patterns of the lines of the log.
    """

    name: str
    make: Callable[[Service], None]
    status: int = 0
    log: tuple[str, ...] = ()


def stop_under_load(service: Service) -> None:
    with unfinished_upload(service) as upload:
        with answered_connections(service):
            service.process.popen.terminate()
        finish(upload)


def close_terminal_under_load(service: Service) -> None:
    """Sends SIGHUP to each process, as the kernel does, and again, as the shell does."""
    with unfinished_upload(service) as upload:
        with answered_connections(service):
            for pid in [*service.pids, service.process.popen.pid] * 2:
                os.kill(pid, signal.SIGHUP)
        finish(upload)


def stop_twice(service: Service) -> None:
    with unfinished_upload(service):
        service.process.popen.terminate()
        wait_until(lambda: refuses_connections(*address(service.process)))
        assert service.process.popen.poll() is None
        service.process.popen.terminate()
        service.process.wait()


def stop_before_it_is_ready(service: Service) -> None:
    """Stops it at once after the fork, or a moment later, when its processes have handlers."""
    wait_until(lambda: service.is_forked)
    time.sleep((0, 0.02, 0.1, 0.2)[list(TOPOLOGIES.values()).index(service.topology)])
    service.process.popen.terminate()


def stop_while_a_process_restarts(service: Service) -> None:
    wait_until(lambda: service.is_whole)
    before = service.pids
    service.end_one(before)
    wait_until(lambda: bool(set(service.pids) - set(before)))
    service.process.popen.terminate()


def kill_supervisor(service: Service) -> None:
    assert service.process.url
    service.process.popen.kill()


ENDINGS: Final = (
    Ending("a stop signal under load", stop_under_load),
    Ending("a terminal that closes under load", close_terminal_under_load),
    Ending("a second stop signal", stop_twice, status=1),
    Ending("a stop signal before it is ready", stop_before_it_is_ready),
    Ending(
        "a stop signal while a process restarts",
        stop_while_a_process_restarts,
        log=(r"(worker|.*device process).* exited by SIGKILL.*restarting it",),
    ),
    Ending("the death of the supervisor", kill_supervisor, status=-signal.SIGKILL),
)


@pytest.mark.slow
@each_topology
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name.replace(" ", "_"))
def test_service_ends_with_all_its_processes(
    start: Start, ending: Ending, topology: Topology
) -> None:
    service = start(topology)
    pids: list[int] = []
    if ending.make not in (stop_before_it_is_ready, stop_while_a_process_restarts):
        wait_until(lambda: service.is_whole)
        pids = service.pids
    ending.make(service)
    assert service.process.wait() == ending.status
    wait_until(lambda: not any(map(is_alive, pids)))
    if service.process.is_serving:
        assert refuses_connections(*address(service.process))
    messages = [line.split(" ", 2)[-1] for line in service.process.lines if " WARNING " in line]
    assert len(messages) == len(ending.log), service.process.lines
    assert all(map(re.fullmatch, ending.log, messages))
    assert not any("Traceback" in line for line in service.process.lines), service.process.lines


@pytest.mark.slow
@each_topology
def test_clients_that_retry_see_no_error_when_the_service_is_restarted(
    command: Callable[..., Process], tmp_path: Path, topology: Topology
) -> None:
    """All processes are killed, and another service takes the port."""
    words = (command, topology, tmp_path / "broken", 60, str(free_port()))
    first = Service(*words)
    with watch(first) as seen:
        first.wait_until_seen("patient client right")
        first.process.kill()
        first.process.wait()  # until they have ended: then the port is free
        second = Service(*words)
        wait_until(lambda: second.is_whole)
        first.wait_until_seen("patient client right")
        first.wait_until_seen("client right")
    assert not {"client wrong", "patient client wrong"} & set(seen)
    assert second.process.end() == 0


@pytest.mark.slow
@each_topology
def test_service_stops_if_a_device_fails_at_the_first_start(
    command: Callable[..., Process], tmp_path: Path, topology: Topology
) -> None:
    (tmp_path / "broken").touch()
    service = Service(command, topology, tmp_path / "broken", stuck_s=60)
    assert service.process.wait() == 1
    assert re.search(r" ERROR .* exited with status 1 .*, before it was ready; the service stops$",
                     service.process.lines[-1])  # fmt: skip
    assert not service.process.is_serving
