"""Faults around the service: slow clients, clock jumps, full disk.

Killed and stuck processes are in test_faults.py, faults of the engine in test_engine_faults.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
from qkv.client.request_builders import build_attend
from qkv.wire import safetensors
from support.commands import one_error, tensors, write_tensors
from support.known_requests import assert_problem
from support.ports import free_port
from support.processes import TIMEOUT_S, Process, run_command, start_command, wait_until
from support.service import Server
from support.service_processes import address

PATH: Final = "/v1/attention/softmax"
PACKAGE: Final = Path(qkv.__file__).parent
Command = Callable[..., Process]
# Small jobs run on the event loop, large ones in the device thread.
SIZES: Final = {"small": (1, 2, 5, 4), "large": (1, 8, 512, 64)}


def arrays(size: str, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {n: draw.normal(size=SIZES[size]).astype("f4") for n in ("query", "key", "value")}


def request_of(size: str, seed: int = 0, weights: str = "none") -> tuple[dict[str, str], bytes]:
    """Returns the headers and the body of a request."""
    call = build_attend("softmax", None, None, weights, arrays(size, seed))
    return dict(call.headers), call.content


def output(http: httpx.Client, size: str, seed: int = 0) -> bytes:
    """Sends a request; returns the bytes of its output."""
    headers, body = request_of(size, seed)
    response = http.post(PATH, content=body, headers=headers)
    assert response.status_code == 200, response.text
    reply = safetensors.decode(response.content, "outputs")
    return bytes(reply.tensors["output"].data)


# slow and disconnected clients


def head(headers: dict[str, str], body: bytes, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read(connection: socket.socket, piece: int = 1 << 16, rest_s: float = 0.0) -> bytes:
    """Returns the body of one response, received in pieces."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += (more := connection.recv(piece))
        assert more, received
    top, _, body = received.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 "), received[:600]
    (length,) = [x for x in top.lower().split(b"\r\n") if x.startswith(b"content-length")]
    pieces = [body]
    remaining = int(length.partition(b":")[2]) - len(body)
    while remaining:
        pieces.append(connection.recv(min(piece, remaining)))
        assert pieces[-1]
        remaining -= len(pieces[-1])
        time.sleep(rest_s)
    return b"".join(pieces)


def connected(server: Server, stack: ExitStack, **options: int) -> socket.socket:
    connection = stack.enter_context(socket.socket())
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(TIMEOUT_S)
    connection.connect(server.address)
    return connection


@pytest.mark.slow
def test_slow_readers_delay_no_other_request(server: Server) -> None:
    """Eight clients read their 8 MiB only after other requests are served."""
    headers, body = request_of("large", weights="full")
    response = server.http.post(PATH, content=body, headers=headers)
    right = safetensors.decode(response.content, "outputs").tensors
    small = output(server.http, "small")
    with ExitStack() as stack:
        slow = [connected(server, stack, SO_RCVBUF=4096) for _ in range(8)]
        for connection in slow:
            connection.sendall(head(headers, body) + body)
        for connection in slow:  # the response has started, and exceeds the buffers
            assert connection.recv(1, socket.MSG_PEEK)
        for _ in range(50):
            assert output(server.http, "small") == small
        server.wait_until_queued(0)
        for connection in slow:
            found = safetensors.decode(read(connection), "outputs").tensors
            assert {n: bytes(t.data) for n, t in found.items()} == {
                n: bytes(t.data) for n, t in right.items()
            }


def test_stalled_connections_delay_no_other_request(server: Server) -> None:
    """Three hundred connections stay open with no request or an incomplete one."""
    headers, body = request_of("large")
    whole = head(headers, body) + body
    small = output(server.http, "small")
    with ExitStack() as stack:
        for cut in (0, 10, len(whole) - len(body), len(whole) // 2) * 75:
            connected(server, stack).sendall(whole[:cut])
        for _ in range(50):
            assert output(server.http, "small") == small
        assert server.queued_count == 0
    assert output(server.http, "small") == small


def test_half_closed_connection_ends_soon(server: Server) -> None:
    """A client that has closed its sending side gets its whole response or none."""
    for size in SIZES:
        headers, body = request_of(size)
        right = output(server.http, size)
        with ExitStack() as stack:
            connection = connected(server, stack)
            connection.sendall(head(headers, body) + body)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while more := connection.recv(1 << 16):
                received += more
        if received:
            top, _, content = received.partition(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 200 ")
            assert bytes(safetensors.decode(content, "outputs").tensors["output"].data) == right
    server.wait_until_queued(0)


def in_progress(process: Process) -> float:
    """Returns the number of the requests that a service has begun to read."""
    page = httpx.get(f"{process.url}/metrics", timeout=TIMEOUT_S).text
    (value,) = re.findall(r"^qkv_requests_in_progress (.*)$", page, re.MULTILINE)
    return float(value)


@pytest.mark.slow
def test_stalled_connections_do_not_delay_the_stop(command: Command) -> None:
    """At the end of the drain an incomplete request gets 503. Connections without a complete head,
    and those of clients that do not read, are closed. The exit status is 0."""
    started = command("serve", "--port", "0", "--workers", "2", QKV_DRAIN_S="1")
    paths = (PATH, "/v1/convert", "/v1/gradients/softmax", "/v2/models/softmax/infer")
    headers, body = request_of("large", weights="full")
    with ExitStack() as stack:

        def send_on_new_connection(what: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(address(started)))
            connection.settimeout(TIMEOUT_S)
            connection.sendall(what)
            return connection

        half = [send_on_new_connection(head(headers, body, path) + body[:1000]) for path in paths]
        for _ in range(5):
            send_on_new_connection(b"")
            send_on_new_connection(b"POST /v1")
            send_on_new_connection(head(headers, body) + body)
        wait_until(lambda: in_progress(started) >= len(half))
        started.popen.terminate()
        assert started.popen.wait(TIMEOUT_S) == 0  # 1 if a process has to be killed
        for path, connection in zip(paths, half, strict=True):
            received = b""
            while more := connection.recv(1 << 16):
                received += more
            top, _, payload = received.partition(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 503 "), (path, received)
            assert b"retry-after: 5" in top.lower()
            assert b"the service is stopping" in json.dumps(json.loads(payload)).encode()
    assert not [line for line in started.lines if "Traceback" in line or " ERROR " in line]


def timers(port: int, client_port: int) -> list[int]:
    """Returns the timer of the open connection of these ports (proc(5), net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [[int(end.rpartition(":")[2], 16) for end in row[1:3]] for row in rows]
    here = [r for r, both in zip(rows, ports, strict=True) if both == [port, client_port]]
    return [int(row[5].partition(":")[0], 16) for row in here if row[3] == "01"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/tcp")
def test_idle_connections_have_keepalive_probes(shared_process: Command) -> None:
    """A vanished client sends no FIN: only keep-alive probes detect it. Without them its connection
    and the received part of its body would stay for ever."""
    where = address(shared_process("--workers", "1"))
    with socket.create_connection(where) as idle:
        idle.sendall(b"POST ")
        ports = where[1], idle.getsockname()[1]
        wait_until(lambda: timers(*ports) == [2])  # 2: keep-alive; 0 without probes


# clock jumps


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_clock_jump_changes_no_output_and_no_deadline(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    served, clock = serve(), time.time
    right = {size: output(served.http, size) for size in SIZES}
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    assert {size: output(served.http, size) for size in SIZES} == right
    assert served.http.get("/livez").status_code == served.http.get("/readyz").status_code == 200
    tensors = [
        {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
        for name in ("query", "key", "value")
    ]
    infer = "/v2/models/softmax/infer"
    for timeout, status in ((60_000_000, 200), (1, 503)):
        document = {"inputs": tensors, "parameters": {"timeout": timeout}}
        with served.hold() if status == 503 else ExitStack():
            assert served.http.post(infer, json=document).status_code == status
    (stats,) = served.http.get("/v2/models/softmax/stats").json()["model_stats"]
    assert abs(stats["last_inference"] / 1e3 - time.time()) < TIMEOUT_S


def test_wall_clock_is_read_for_displayed_times_only() -> None:
    """No jump of the wall clock can move a deadline, a heartbeat or a timeout."""
    wall = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "CLOCK_REALTIME"}
    read_in: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in wall
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime", "date")
            ):
                read_in.add(path.relative_to(PACKAGE).as_posix())
    # last_inference, the time of a log line, and the time of a span
    assert read_in == {
        "api/observability.py", "telemetry/counters.py", "telemetry/tracing.py",
    }  # fmt: skip


# full disks


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        (("attend", "softmax"), ".npz"), (("attend", "softmax"), ".json"),
        (("convert", "--from", "v2", "--to", "v1"), ".safetensors"),
    ],
)  # fmt: skip
def test_full_disk_keeps_the_old_file(tmp_path: Path, words: tuple[str, ...], suffix: str) -> None:
    """Every command that writes files, and every format: one line, and the old file stays."""
    target = tmp_path / f"out{suffix}"
    target.write_bytes(b"old")
    square = np.eye(8, dtype=np.float32)
    layer = {f"W_{role}.weight": square for role in ("query", "key", "value")}
    group, given = ("inputs", tensors()) if words[0] == "attend" else ("tensors", layer)
    source = write_tensors(tmp_path / "in.npz", group, given)
    command = (*words, source, "-o", target, "--local")
    done = run_command(*command, limits={resource.RLIMIT_FSIZE: 100})
    assert f"{target}: File too large" in one_error(done.stderr)
    assert done.returncode == 1
    assert target.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == {source, target}


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_full_stdout_is_a_one_line_error() -> None:
    with open("/dev/full", "w") as full:
        process = Process(("variants", "--local"), {}, stdout=full)
        assert process.wait() != 0
    assert "No space left on device" in one_error("\n".join(process.lines))


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_full_stderr_stops_no_service() -> None:
    port = free_port()
    words = ("serve", "--port", str(port), "--workers", "1")
    with open("/dev/full", "w") as full, open(os.devnull, "w") as nothing:
        started = start_command(words, {"QKV_DEVICE": "cpu"}, nothing.fileno(), full.fileno())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http:

            def is_ready() -> bool:
                assert started.poll() is None
                try:
                    return http.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_ready)
            assert output(http, "large")
            assert_problem(http.post(PATH, json={}), 422)
            assert json.loads(http.get("/livez").text) == {"status": "ok"}
        started.terminate()
        assert started.wait(TIMEOUT_S) == 0
    finally:
        started.kill()
        started.wait()
