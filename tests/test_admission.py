"""More than there is room for, deadlines, leavers and faults, over real sockets and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import faulty
import httpx
import numpy as np
import pytest
import torch
from caller import asked_of, body_of, calling, drawn, request_of
from cases import refused
from conftest import PATIENCE, Process, Server, until
from test_device_process import device_process
from test_serve import address, ask, big, children

import qkv
import qkv.engine
import qkv.faults
from qkv.conversion import convert_message
from qkv.door import Place
from qkv.job import Job
from qkv.message import Message
from qkv.queue import Load
from qkv.run import Ran, run

PATH: Final = "/v1/attention/softmax"
JSON: Final = {"Content-Type": "application/json"}
SAFETENSORS: Final = {"Content-Type": "application/vnd.safetensors"}
INFER: Final = "/v2/models/softmax/infer"
HEAD: Final = "POST /v1/attention/softmax HTTP/1.1\r\nHost: here\r\n"
Serve = Callable[..., Server]


def body(first: float = 1.0, rows: int = 2, width: int = 4, seed: int = 0) -> bytes:
    draw, shape = np.random.default_rng(seed), (1, 1, rows, width)
    arrays = {n: draw.normal(size=shape).astype(np.float32) for n in ("query", "key", "value")}
    arrays["query"][0, 0, 0, 0] = first
    return qkv.calls.build_attend("softmax", None, ["output"], "none", arrays).content


def post(url: str, content: bytes, **headers: str) -> httpx.Response:
    sent = SAFETENSORS | headers
    return httpx.post(url + PATH, content=content, headers=sent, timeout=PATIENCE)


def outputs(response: httpx.Response) -> bytes:
    """The tensor's bytes, which come last."""
    assert response.status_code == 200, response.text
    return response.content[-32:]


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, PATIENCE) as connection:
        yield connection


def answer(connection: socket.socket) -> str:
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connection.recv(65536)
        assert piece, "the connection ended without an answer"
        got += piece
    return got.decode("latin-1")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the device runs."""
    every: list[Job] = []

    def recorded(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        every.extend(jobs)
        return run(jobs, *how)

    monkeypatch.setattr(qkv.engine, "run", recorded)
    return every


# ---------------------------------------------------------------- admission


def test_so_many_requests_may_wait_and_no_more(serve: Serve) -> None:
    server = serve(max_queue=3)
    with ThreadPoolExecutor(3) as pool:
        with server.engine.hold():
            waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
            server.await_waiting(3)
            for path, content in ((PATH, body()), (INFER, b"{}"), (PATH, b"no tensors at all")):
                response = httpx.post(server.url + path, content=content, headers=SAFETENSORS)
                assert response.status_code == 503  # whatever it says: it was not read
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert "3 requests wait already; at most 3 may" in response.text
        assert all(future.result().is_success for future in waiting)
    assert post(server.url, body()).is_success


def test_it_is_said_before_a_body_is_sent(serve: Serve) -> None:
    server = serve(max_queue_bytes=1000)
    with ThreadPoolExecutor(1) as pool, server.engine.hold():
        waiting = pool.submit(post, server.url, body())
        server.await_waiting(1)
        with connected(server) as connection:
            head = f"{HEAD}Expect: 100-continue\r\nContent-Length: 900\r\n\r\n"
            connection.sendall(head.encode())
            said = answer(connection)
        assert said.startswith("HTTP/1.1 503 ")
        assert "retry-after: 1\r\n" in said
        assert not waiting.done()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_who_sends_all_before_reading_is_answered_and_not_reset(
    serve: Serve, connection: str
) -> None:
    server = serve(max_queue_bytes=1000)
    content = bytes(24 << 20)
    with ThreadPoolExecutor(1) as pool, server.engine.hold():
        pool.submit(post, server.url, body())
        server.await_waiting(1)
        for _ in range(3):
            response = post(server.url, content, Connection=connection)
            refused(response, 503)
        assert server.engine.door.comes.requests == 0


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_come_in_count(serve: Serve, declared: bool) -> None:
    server = serve(max_queue_bytes=3000)
    length = "Content-Length: 2000" if declared else "Transfer-Encoding: chunked"
    piece = b" " * 1500 if declared else b"5dc\r\n%b\r\n" % (b" " * 1500)
    with connected(server) as slow:
        slow.sendall(f"{HEAD}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + piece)
        until(lambda: server.engine.door.comes.bytes >= 1500)
        assert server.engine.door.comes.requests == 1
        problem = refused(post(server.url, body(rows=40)), 503)
        assert "at most 3000 may" in problem["detail"]
        assert post(server.url, body()).is_success  # there is room for this one
        if declared:
            slow.sendall(b" " * 500)
            assert answer(slow).startswith("HTTP/1.1 400 ")
    until(lambda: server.engine.door.comes.requests == 0)  # answered, or gone in the midst of it
    assert post(server.url, body(rows=40)).is_success


def test_too_long_a_body_is_too_long_whatever_waits(serve: Serve) -> None:
    server = serve(max_queue_bytes=3000, max_body_bytes=2000)
    with ThreadPoolExecutor(1) as pool, server.engine.hold():
        pool.submit(post, server.url, body())
        server.await_waiting(1)
        refused(post(server.url, bytes(5000)), 413)


def test_retry_after_says_how_long_the_queue_is(serve: Serve, ran: list[Job]) -> None:
    """Each took two seconds, as far as the queue knows; three wait."""
    server = serve(max_queue=3)
    rate = server.engine._queue.rate
    with ThreadPoolExecutor(3) as pool, server.engine.hold():
        waiting = [pool.submit(post, server.url, body()) for _ in range(3)]
        server.await_waiting(3)
        (load,) = {w.load for w in server.engine._queue._orders[2]}
        for _ in range(200):
            rate.add(load, 2.0)
        response = post(server.url, body())
        refused(response, 503)
        assert response.headers["retry-after"] == "6"
    assert all(future.result().is_success for future in waiting)


def test_flops_that_wait_are_bounded(serve: Serve) -> None:
    server = serve(max_queue_flops=10_000)
    with ThreadPoolExecutor(2) as pool, server.engine.hold():
        pool.submit(post, server.url, body(rows=2))
        server.await_waiting(1)
        problem = refused(post(server.url, body(rows=50)), 503)
        assert "floating-point operations wait already" in problem["detail"]
        pool.submit(post, server.url, body(rows=2))
        server.await_waiting(2)


def test_conversions_count_while_they_come_in_and_until_they_are_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_queue=2)
    converting, leave = threading.Event(), threading.Event()

    def slow(message: Message) -> Message:
        converting.set()
        assert leave.wait(PATIENCE)
        return convert_message(message)

    monkeypatch.setattr("qkv.routes.convert.convert_message", slow)
    layer = {name: [[1, 0], [0, 1]] for name in ("W_query", "W_key", "W_value")}
    content = json.dumps({"from": "v1", "to": "v2", "tensors": layer}).encode()

    def asked() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/convert", content=content, timeout=PATIENCE)

    with ThreadPoolExecutor(1) as pool, connected(server) as coming:
        running = pool.submit(asked)
        assert converting.wait(PATIENCE)
        assert server.engine.door.comes.requests == 1
        assert server.engine.door.comes.bytes > len(content)
        head = "POST /v1/convert HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n\r\n"
        coming.sendall(head.encode())
        until(lambda: server.engine.door.comes.requests == 2)
        for response in (asked(), post(server.url, body())):
            assert "2 requests wait already" in refused(response, 503)["detail"]
            assert response.headers["retry-after"] == "1"
        leave.set()
        assert running.result(PATIENCE).is_success
        until(lambda: server.engine.door.comes.requests == 1)
        assert asked().is_success
    until(lambda: server.engine.door.comes == Load())


def test_bodies_on_the_shortest_way_count_where_they_are_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come with their head are answered at once: nothing is counted for them."""
    server = serve(max_queue=1)
    door, request = server.engine.door, request_of(*body_of(drawn(0)))
    entered: list[int] = []
    enter = door.enter

    def counted(size: int) -> Place:
        entered.append(size)
        return enter(size)

    monkeypatch.setattr(door, "enter", counted)
    with calling(server) as slow, calling(server) as other:
        for _ in range(4):
            other.send(request)
            other.answer()
        assert len(entered) == 1  # the first, which took the long way
        entered.clear()
        slow.send(request[:-100])
        until(lambda: door.comes.requests == 1)
        size = len(request.partition(b"\r\n\r\n")[2])
        assert entered == [size]
        assert door.comes.bytes == size
        slow.send(request[-100:-50])
        other.send(request)  # it is there as a whole, and waits for nothing
        other.answer()
        assert entered == [size]
        other.send(request[:-100])
        until(lambda: len(entered) == 3)  # refused here, and then on the long way
        other.send(request[-100:])
        assert other.status() == 503
        other.rest()
        assert door.comes.requests == 1
        slow.send(request[-50:])
        slow.answer()
        until(lambda: door.comes == Load())
        slow.send(request[:-100])
        until(lambda: door.comes.requests == 1)
    until(lambda: door.comes == Load())  # it left in the midst of it
    assert asked_of(server) == 0


# ---------------------------------------------------------------- deadlines


def test_a_request_may_say_how_long_it_waits(serve: Serve, ran: list[Job]) -> None:
    server = serve()
    document = {
        "inputs": [
            {"name": n, "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            for n in ("query", "key", "value")
        ]
    }
    with server.engine.hold():
        ran.clear()
        problem = refused(post(server.url, body(), **{"X-Request-Timeout": "0.05"}), 504)
        assert problem["detail"] == "the device was not free within 50 ms"
        late = httpx.post(server.url + INFER, json=document, headers={"X-Request-Timeout": "0.05"})
        assert late.status_code == 503
        assert "50 ms" in late.text
        document["parameters"] = {"timeout": 20_000}  # type: ignore[assignment]
        late = httpx.post(server.url + INFER, json=document, headers={"X-Request-Timeout": "9"})
        assert "20 ms" in late.text
        assert server.waiting == 0
    assert post(server.url, body(), **{"X-Request-Timeout": "9"}).is_success
    assert len(ran) == 1


def test_the_service_may_have_a_deadline_for_all(serve: Serve, ran: list[Job]) -> None:
    server = serve(request_timeout_s=0.05)
    with server.engine.hold():
        ran.clear()
        assert "50 ms" in refused(post(server.url, body()), 504)["detail"]
        for said, wait in (("0.02", "20 ms"), ("20", "50 ms")):
            response = post(server.url, body(), **{"X-Request-Timeout": said})
            assert wait in refused(response, 504)["detail"]
    assert post(server.url, body()).is_success
    assert len(ran) == 1


@pytest.mark.parametrize("said", ["0", "-1", "nan", "inf", "soon", "", "1e10"])
def test_what_is_no_deadline_is_refused(server: Server, said: str) -> None:
    problem = refused(post(server.url, body(), **{"X-Request-Timeout": said}), 400)
    assert "X-Request-Timeout" in problem["detail"]


def test_one_whose_time_is_up_does_not_run_though_the_loop_was_too_busy_to_say_so(
    serve: Serve, ran: list[Job]
) -> None:
    server = serve()
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert leave.wait(PATIENCE)

    assert server.engine._loop is not None
    with ThreadPoolExecutor(1) as pool:
        with server.engine.hold():
            ran.clear()
            late = pool.submit(post, server.url, body(), **{"X-Request-Timeout": "0.5"})
            server.await_waiting(1)
            server.engine._loop.call_soon_threadsafe(block)
            assert entered.wait(PATIENCE)
            time.sleep(0.6)
        until(lambda: server.waiting == 0)  # the device is free, and takes it
        leave.set()
        assert "500 ms" in refused(late.result(PATIENCE), 504)["detail"]
    assert ran == []


# ---------------------------------------------------------------- leavers


def test_of_two_hundred_who_leave_none_is_run(serve: Serve, ran: list[Job]) -> None:
    server = serve(max_batch=32)
    content = body()
    head = f"{HEAD}Content-Type: {SAFETENSORS['Content-Type']}\r\nContent-Length: {len(content)}"
    with ThreadPoolExecutor(1) as pool:
        with server.engine.hold():
            ran.clear()
            with ExitStack() as stack:
                for _ in range(200):
                    leaving = stack.enter_context(connected(server))
                    leaving.sendall(head.encode() + b"\r\n\r\n" + content)
                server.await_waiting(200)
                staying = pool.submit(post, server.url, body(seed=1))
                server.await_waiting(201)
            server.await_waiting(1)
        assert staying.result(PATIENCE).is_success
    assert len(ran) == 1
    assert server.engine._queue.waits.requests == 0


# ---------------------------------------------------------------- faults


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv.engine, "run", faulty.failing)
    monkeypatch.setattr(qkv.faults, "works", faulty.works)
    monkeypatch.setattr(faulty, "_broken", [])


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("number", [faulty.POISON, faulty.ENDING])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_a_poisonous_request_fails_alone(serve: Serve, place: int, number: float) -> None:
    server = serve(max_batch=32)
    bodies = [body(seed=seed) for seed in range(32)]
    alone = [outputs(post(server.url, content)) for content in bodies]
    bodies[place] = body(number)
    with ThreadPoolExecutor(32) as pool:
        with server.engine.hold():
            asked = [pool.submit(post, server.url, content) for content in bodies]
            server.await_waiting(32)
        answers = [future.result(PATIENCE) for future in asked]
    for i, (wanted, response) in enumerate(zip(alone, answers, strict=True)):
        if i == place:
            assert response.status_code == 500
            assert "marked" not in response.text
        else:
            assert outputs(response) == wanted
    assert server.engine.alive
    assert post(server.url, body()).is_success


def test_out_of_memory_makes_smaller_batches_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has room for so many bytes; none of those who wait notices."""
    monkeypatch.setattr(qkv.engine, "_BATCH_BYTES", 64 << 20)
    sizes: list[int] = []
    room = [4 << 20]

    def tight(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        size = sum(job.bytes_in + job.bytes_out for job in jobs)
        if size > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        sizes.append(len(jobs))
        return run(jobs, *how)

    server = serve(max_batch=32)
    monkeypatch.setattr(qkv.engine, "run", tight)
    content = body(rows=1, width=1 << 16)  # 1 MiB, with its answer

    def wave() -> list[int]:
        sizes.clear()
        with ThreadPoolExecutor(16) as pool:
            with server.engine.hold():
                asked = [pool.submit(post, server.url, content) for _ in range(16)]
                server.await_waiting(16)
            assert all(future.result(PATIENCE).is_success for future in asked)
        return list(sizes)

    assert wave() == [4, 4, 4, 4]
    lowered = server.engine._budget.bytes
    assert lowered < 16 << 20
    room[0] = 64 << 20
    assert max(wave()) < 16  # it stays so for a while
    for _ in range(20):
        last = wave()
    assert last == [16]
    room[0] = 0
    refused(post(server.url, content), 503)
    monkeypatch.setattr(qkv.engine, "run", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    assert "memory" in refused(post(server.url, content), 413)["detail"]
    assert server.engine.alive


@pytest.mark.usefixtures("faults")
def test_after_a_sticky_error_all_are_told_and_it_is_not_ready(serve: Serve) -> None:
    server = serve(max_batch=4)
    assert server.http.get("/readyz").status_code == 200
    with ThreadPoolExecutor(12) as pool:
        with server.engine.hold():
            asked = [pool.submit(post, server.url, body(faulty.STICKY))]
            server.await_waiting(1)
            asked += [pool.submit(post, server.url, body(rows=2 + i % 3)) for i in range(11)]
            server.await_waiting(12)
        answers = [future.result(PATIENCE) for future in asked]
    for response in answers:
        assert "the device has failed" in refused(response, 503)["detail"]
        assert int(response.headers["retry-after"]) >= 1
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/livez").status_code == 200
    refused(post(server.url, body()), 503)


@pytest.mark.usefixtures("faults")
def test_what_would_end_the_process_is_an_answer_where_it_runs_on_the_loop(serve: Serve) -> None:
    server = serve()
    for _ in range(3):
        response = post(server.url, body(faulty.ENDING))
        assert response.status_code == 500
        assert "marked" not in response.text
        assert post(server.url, body()).is_success


@pytest.fixture(params=["each", "one"])
def fleet(request: pytest.FixtureRequest, command: Callable[..., Process]) -> Process:
    """Two workers, each with its device or with one for both, which fail when asked to."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = command(
        "serve", "--port", "0", "--workers", "2",
        module="faulty", QKV_DEVICE_PROCESS=request.param, QKV_MAX_BATCH="32",
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
