"""What goes wrong around the service, and how little its callers see of it: processes that are
killed, a device that fails, callers that dawdle or vanish, clocks that jump, disks that are full.

Workers that are killed or hang one at a time are in test_serve.py, the device process in
test_device_process.py, the engine's own faults in test_engine_faults.py.
"""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
from qkv.client.request_builders import build_attend
from qkv.wire import safetensors
from support.commands import one_error, run_with_rlimit, tensors, write_tensors
from support.known_requests import assert_problem
from support.ports import free_port
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server
from support.service_processes import address, child_pids, is_alive, repeat_in_threads

PATH: Final = "/v1/attention/softmax"
PACKAGE: Final = Path(qkv.__file__).parent
Command = Callable[..., Process]
# Beyond what is run at once, on the event loop: these go to the device's thread.
SIZES: Final = {"small": (1, 2, 5, 4), "large": (1, 8, 512, 64)}


def arrays(size: str, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {n: draw.normal(size=SIZES[size]).astype("f4") for n in ("query", "key", "value")}


def asked(size: str, seed: int = 0, weights: str = "none") -> tuple[dict[str, str], bytes]:
    """Headers and body, as a client sends them."""
    call = build_attend("softmax", None, None, weights, arrays(size, seed))
    return dict(call.headers), call.content


def output(http: httpx.Client, size: str, seed: int = 0) -> bytes:
    """The output's bytes."""
    headers, body = asked(size, seed)
    response = http.post(PATH, content=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = safetensors.decode(response.content, "outputs")
    return bytes(answer.tensors["output"].data)


# processes are killed


@contextmanager
def retrying(url: str, count: int) -> Iterator[list[bool]]:
    """That many clients that retry ask on, small and large; yields whether answers were right."""
    with ExitStack() as stack:
        clients = [stack.enter_context(qkv.Client(url, retries=8)) for _ in range(count)]
        kinds = [(("small", "large")[index % 2], index) for index in range(count)]
        wanted = [clients[0].attend("softmax", **arrays(*kind)).output for kind in kinds]

        def once(index: int) -> bool:
            found = clients[index].attend("softmax", **arrays(*kinds[index])).output
            return bool((found == wanted[index]).all())

        with repeat_in_threads(count, once) as seen:
            yield seen


@pytest.mark.slow
def test_workers_killed_in_a_row_cost_a_retrying_client_nothing(command: Command) -> None:
    started = command("serve", "--port", "0", "--workers", "2")
    draw = random.Random(0)
    with retrying(started.url, 4) as seen:
        for _ in range(4):
            count = len(seen)
            wait_until(lambda count=count: len(seen) > count + 20)  # type: ignore[misc]
            time.sleep(1.1 + draw.random() / 10)  # past the second of a death at birth
            os.kill(draw.choice(child_pids(started.popen.pid)), signal.SIGKILL)
        count = len(seen)
        wait_until(lambda: len(seen) > count + 50)
    assert all(seen)
    assert started.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_a_service_killed_and_started_again_costs_a_retrying_client_nothing(
    command: Command, at_once: bool
) -> None:
    """kill -9 of every process of it, or of the parent alone, whose workers then end."""
    port = str(free_port())
    words = ("serve", "--port", port, "--workers", "2")
    first = command(*words)
    with retrying(first.url, 4) as seen:
        wait_until(lambda: len(seen) > 20)
        workers = child_pids(first.popen.pid)
        for pid in [*workers, first.popen.pid] if at_once else [first.popen.pid]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)))
        count = len(seen)
        second = command(*words)
        assert second.url == first.url
        wait_until(lambda: len(seen) > count + 50)
    assert all(seen)
    assert second.end() == 0


# the device fails


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("secret"), 500),
        (AssertionError("secret"), 500),
        (StopIteration("secret"), 500),
        (SystemExit("secret"), 500),
        (MemoryError("secret"), 503),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("size", SIZES)
def test_what_fails_on_the_device_is_told_and_the_next_is_answered(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    error: BaseException,
    status: int,
) -> None:
    """In its thread or on the loop; nothing of the inside is told."""

    def failing(*_: Any) -> Any:
        raise error

    served = serve()
    right = output(served.http, size)
    headers, body = asked(size, 1)
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "execute", failing)
        response = served.http.post(PATH, content=body, headers=headers)
    assert response.status_code == status
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert ("Retry-After" in response.headers) == (status == 503)
    assert output(served.http, size) == right
    assert served.http.get("/livez").status_code == 200


# callers dawdle, or vanish


def head(headers: dict[str, str], body: bytes, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read(connection: socket.socket, piece: int = 1 << 16, rest_s: float = 0.0) -> bytes:
    """The body of one answer, so many bytes at a time."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += (more := connection.recv(piece))
        assert more, came
    top, _, body = came.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 "), came[:600]
    (length,) = [x for x in top.lower().split(b"\r\n") if x.startswith(b"content-length")]
    pieces = [body]
    left = int(length.partition(b":")[2]) - len(body)
    while left:
        pieces.append(connection.recv(min(piece, left)))
        assert pieces[-1]
        left -= len(pieces[-1])
        time.sleep(rest_s)
    return b"".join(pieces)


def connected(server: Server, stack: ExitStack, **options: int) -> socket.socket:
    connection = stack.enter_context(socket.socket())
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(TIMEOUT_S)
    connection.connect(server.address)
    return connection


def test_slow_readers_hold_nobody_up(server: Server) -> None:
    """Eight answers of 8 MiB wait in the service while others are served; then they are read."""
    headers, body = asked("large", weights="full")
    response = server.http.post(PATH, content=body, headers=headers)
    right = safetensors.decode(response.content, "outputs").tensors
    small = output(server.http, "small")
    with ExitStack() as stack:
        slow = [connected(server, stack, SO_RCVBUF=4096) for _ in range(8)]
        for connection in slow:
            connection.sendall(head(headers, body) + body)
        for connection in slow:  # the answer is on its way, and does not fit
            assert connection.recv(1, socket.MSG_PEEK)
        for _ in range(50):
            assert output(server.http, "small") == small
        server.wait_until_queued(0)
        for connection in slow:
            found = safetensors.decode(read(connection), "outputs").tensors
            assert {n: bytes(t.data) for n, t in found.items()} == {
                n: bytes(t.data) for n, t in right.items()
            }


@pytest.mark.parametrize("size", SIZES)
def test_slow_writers_hold_nobody_up(server: Server, size: str) -> None:
    """Bodies that come in pieces, all at the same time, while others are served."""
    headers, body = asked(size)
    right, small = output(server.http, size), output(server.http, "small")
    whole = head(headers, body) + body
    step = -(-len(whole) // 30)
    with ExitStack() as stack:
        slow = [connected(server, stack) for _ in range(20)]
        for start in range(0, len(whole), step):
            for connection in slow:
                connection.sendall(whole[start : start + step])
            assert output(server.http, "small") == small
        for connection in slow:
            found = safetensors.decode(read(connection), "outputs").tensors
            assert bytes(found["output"].data) == right


def test_who_never_goes_on_holds_nobody_up(server: Server) -> None:
    """Three hundred connections that say nothing, or half of something, and stay."""
    headers, body = asked("large")
    whole = head(headers, body) + body
    small = output(server.http, "small")
    with ExitStack() as stack:
        for cut in (0, 10, len(whole) - len(body), len(whole) // 2) * 75:
            connected(server, stack).sendall(whole[:cut])
        for _ in range(50):
            assert output(server.http, "small") == small
        assert server.queued_count == 0
    assert output(server.http, "small") == small


def test_who_closes_one_half_is_answered_or_let_go(server: Server) -> None:
    """A caller that will send no more may still listen, or may have gone: both end soon."""
    for size in SIZES:
        headers, body = asked(size)
        with ExitStack() as stack:
            connection = connected(server, stack)
            connection.sendall(head(headers, body) + body)
            connection.shutdown(socket.SHUT_WR)
            came = b""
            while more := connection.recv(1 << 16):
                came += more
        assert came == b"" or came.startswith(b"HTTP/1.1 200 ")
    server.wait_until_queued(0)


@pytest.mark.slow
def test_who_never_goes_on_holds_up_no_stop(command: Command) -> None:
    """Whoever has sent half a request is told when the time is over; who has sent no whole head,
    or does not read, is let go. None of it is a failure."""
    started = command("serve", "--port", "0", "--workers", "2", QKV_DRAIN_S="2")
    paths = (PATH, "/v1/convert", "/v1/gradients/softmax", "/v2/models/softmax/infer")
    headers, body = asked("large", weights="full")
    with ExitStack() as stack:

        def sends(what: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(address(started)))
            connection.settimeout(TIMEOUT_S)
            connection.sendall(what)
            return connection

        half = [sends(head(headers, body, path) + body[:1000]) for path in paths]
        for _ in range(5):
            sends(b"")
            sends(b"POST /v1")
            sends(head(headers, body) + body)
        time.sleep(0.5)
        since = time.monotonic()
        started.popen.terminate()
        assert started.popen.wait(TIMEOUT_S) == 0
        assert time.monotonic() - since < 10
        for path, connection in zip(paths, half, strict=True):
            came = b""
            while more := connection.recv(1 << 16):
                came += more
            top, _, said = came.partition(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 503 "), (path, came)
            assert b"retry-after: 5" in top.lower()
            assert b"the service is stopping" in json.dumps(json.loads(said)).encode()
    assert not [line for line in started.lines if "Traceback" in line]


def timers(port: int) -> list[int]:
    """The kinds of timer that run at this end of a port's open connections (proc(5), net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here = [r for r in rows if int(r[1].rpartition(":")[2], 16) == port and r[3] == "01"]
    return [int(row[5].partition(":")[0], 16) for row in here]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/tcp")
def test_a_machine_that_vanishes_is_found_out(process: Process) -> None:
    """It sends no FIN: only probes tell it from one that has nothing to say. Without them it
    would hold its place, and what came of its body, for ever."""
    with socket.create_connection(address(process)) as idle:
        idle.sendall(b"POST ")
        wait_until(lambda: 2 in timers(address(process)[1]))


# clocks jump


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_no_answer_and_no_deadline(
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
        told = {"inputs": tensors, "parameters": {"timeout": timeout}}
        with served.hold() if status == 503 else ExitStack():
            assert served.http.post(infer, json=told).status_code == status
    (stats,) = served.http.get("/v2/models/softmax/stats").json()["model_stats"]
    assert abs(stats["last_inference"] / 1e3 - time.time()) < TIMEOUT_S


@pytest.mark.slow
def test_a_service_that_was_paused_goes_on(command: Command) -> None:
    """As a machine's is that sleeps or moves: for all of its processes at once, time jumps past
    every limit there is. Nobody is stuck, late or slow for that."""
    limits = {"QKV_STUCK_S": "1", "QKV_STUCK_DEVICE_S": "1", "QKV_READ_TIMEOUT_S": "1"}
    started = command("serve", "--port", "0", "--workers", "2", **limits)
    headers, body = asked("large")
    whole = head(headers, body) + body
    with retrying(started.url, 4) as seen:
        family = [started.popen.pid, *child_pids(started.popen.pid)]
        for _ in range(2):
            count = len(seen)
            wait_until(lambda count=count: len(seen) > count + 20)  # type: ignore[misc]
            with socket.create_connection(address(started), TIMEOUT_S) as slow:
                slow.sendall(whole[:1000])
                for pid in family:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(3)
                for pid in family:
                    os.kill(pid, signal.SIGCONT)
                slow.sendall(whole[1000:])
                assert safetensors.decode(read(slow), "outputs").tensors
        with httpx.Client(base_url=started.url, timeout=TIMEOUT_S) as http:
            wait_until(lambda: http.get("/livez").status_code == 200)
            assert http.get("/readyz").status_code == 200
    assert all(seen)
    assert child_pids(started.popen.pid) == family[1:]
    assert started.end() == 0


def test_nothing_but_a_date_to_show_is_read_from_the_clock_that_jumps() -> None:
    """So that no jump can move a deadline, a pulse or a wait."""
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
    # last_inference, a line of log, and when a span was
    assert read_in == {
        "api/observability.py", "telemetry/model_stats.py", "telemetry/tracing.py",
    }  # fmt: skip


# disks are full


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json"])
@pytest.mark.parametrize(
    "words", [("attend", "softmax"), ("convert", "--from", "v2", "--to", "v1")]
)
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, words: tuple[str, ...], suffix: str
) -> None:
    """Every command that writes, in every format: one line, and no half of a file."""
    target = tmp_path / f"out{suffix}"
    target.write_bytes(b"old")
    square = np.eye(8, dtype=np.float32)
    layer = {f"W_{role}.weight": square for role in ("query", "key", "value")}
    group, given = ("inputs", tensors()) if words[0] == "attend" else ("tensors", layer)
    source = write_tensors(tmp_path / "in.npz", group, given)
    done = run_with_rlimit(
        "RLIMIT_FSIZE", 100, words[0], *words[1:], source, "-o", target, "--local"
    )
    assert f"{target}: File too large" in one_error(done.stderr)
    assert done.returncode == 1
    assert target.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == {source, target}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_what_cannot_be_printed_is_a_failure_that_says_so() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qkv", "variants", "--local"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert "No space left on device" in one_error(done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
def test_a_log_that_cannot_be_written_stops_no_service() -> None:
    port = free_port()
    words = [sys.executable, "-m", "qkv", "serve", "--port", str(port), "--workers", "1"]
    with open("/dev/full", "w") as full:
        started = subprocess.Popen(words, env=os.environ | {"QKV_DEVICE": "cpu"}, stderr=full)
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
