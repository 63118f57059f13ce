"""Requests to a service with several processes, and information about its processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
import numpy as np

from qkv.client.request_builders import build_attend
from support.processes import TIMEOUT_S, Process

PATH: Final = "/v1/attention/softmax"
TINY_BODY: Final = json.dumps(
    {"inputs": {name: [[1.0, 0.0], [0.0, 1.0]] for name in ("query", "key", "value")}}
).encode()
JSON: Final = {"Content-Type": "application/json"}


def slow_request_body(length: int, heads: int = 8) -> bytes:
    """Returns the body of a request that keeps a worker busy for a while."""
    draw = np.random.default_rng(0)
    shape = (1, heads, length, 16)
    arrays = {n: draw.normal(size=shape).astype(np.float32) for n in ("query", "key", "value")}
    call = build_attend("softmax", None, ["output"], "none", arrays)
    return call.content


SAFETENSORS: Final = {"Content-Type": "application/vnd.safetensors"}


def address(process: Process) -> tuple[str, int]:
    """Returns host and port of a service."""
    url = httpx.URL(process.url)
    assert url.port
    return url.host, url.port


def child_pids(pid: int) -> list[int]:
    """Returns the ids of the child processes."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stops processes, so that other workers accept all connections."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def is_alive(pid: int) -> bool:
    """Returns True if a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def open_files(pid: int) -> set[str]:
    """Returns what the open files of a process are; none if it does not run.

    It may close one, or end, between the list and a look.
    """
    found = set[str]()
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def status_of(
    url: str,
    path: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 5.0,
) -> int:
    """Returns the status of a GET on a new connection; 0 without a response.

    Tests wait for a status: a client of httpx for each look took most of the time.
    """
    host = httpx.URL(url).netloc.decode()
    with closing(http.client.HTTPConnection(host, timeout=timeout_s)) as client:
        try:
            client.request("GET", path, headers=dict(headers))
            return client.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def refuses_connections(host: str, port: int) -> bool:
    """Returns True if nothing accepts connections at this address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) != 0


@contextmanager
def repeat_in_threads(count: int, call_once: Callable[[int], object]) -> Iterator[list[Any]]:
    """Calls `call_once` repeatedly in `count` threads; yields the list of its results."""
    ended, seen = threading.Event(), list[Any]()

    def loop(index: int) -> None:
        while not ended.is_set():
            seen.append(call_once(index))

    with ThreadPoolExecutor(count) as pool:
        loops = [pool.submit(loop, index) for index in range(count)]
        try:
            yield seen
        finally:
            ended.set()
        for done in loops:
            done.result(TIMEOUT_S)


class RawRequest:
    """One request on a plain socket, and all bytes of its response.

    The service has read a request once a byte of its response has arrived.
    """

    def __init__(self, connection: socket.socket, body: bytes, headers: dict[str, str]) -> None:
        lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.connection = connection
        self.answer = b""
        self.error: OSError | None = None
        try:
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            while not self.whole and (more := connection.recv(1 << 20)):
                self.answer += more
        except OSError as error:
            self.error = error

    @property
    def head(self) -> bytes:
        return self.answer.partition(b"\r\n\r\n")[0].lower()

    @property
    def status(self) -> int:
        """The status of the response; 0 without a response."""
        return int(self.answer[9:12]) if self.answer else 0

    @property
    def whole(self) -> bool:
        head, end, body = self.answer.partition(b"\r\n\r\n")
        if not end:
            return False
        (length,) = [
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        return len(body) == int(length.split(b":")[1])

    @property
    def closing(self) -> bool:
        return b"connection: close" in self.head


def device_process_pids(service_process: Process) -> list[int]:
    """Returns the ids of the children that run and have no listening socket."""
    _, port = address(service_process)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (r[9] for r in rows if r[3] == "0A" and int(r[1].partition(":")[2], 16) == port)
    return [
        pid
        for pid in child_pids(service_process.popen.pid)
        if (files := open_files(pid)) and f"socket:[{inode}]" not in files
    ]


def device_process_pid(service_process: Process) -> int:
    """Returns the id of the only child that has no listening socket."""
    (found,) = device_process_pids(service_process)
    return found
