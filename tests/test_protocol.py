"""The shortest way that a request may take ends where the others do, however its bytes come."""

from __future__ import annotations

import gc
import itertools
import json
import re
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pybase64
import pytest
import torch
from conftest import PATIENCE, Server, running, serving, until

from qkv import wire
from qkv.catalogue import fixed_size, variants
from qkv.engine import Engine
from qkv.job import Job, Limits
from qkv.message import Message
from qkv.protocol import Protocol
from qkv.routes.shortcuts import Asked, Reply, Shortcuts
from qkv.run import Standing, run
from qkv.short import Head, Short
from qkv.tensors import RawTensor
from qkv.wire import v2

Array = np.ndarray[Any, Any]

PATH: Final = "/v2/models/softmax/infer"
NAMES: Final = ("query", "key", "value")
LINE: Final = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Standing]:
    """What has taken the shortest way."""
    taken: list[Standing] = []
    run_standing = Engine.run_standing

    def counted(engine: Engine, standing: Standing) -> Any:
        answer = run_standing(engine, standing)
        if answer is not None:
            taken.append(standing)
        return answer

    monkeypatch.setattr(Engine, "run_standing", counted)
    return taken


def drawn(seed: int, shape: tuple[int, ...] = (1, 2, 8, 16), dtype: Any = np.float32) -> Any:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name in NAMES}


def inputs_of(name: str, dtype: Any = np.float32, size: int = 8) -> dict[str, Array]:
    """What a variant needs, every axis of one size."""
    random, inputs = np.random.default_rng(0), variants()[name].inputs.values()
    return {
        spec.name: random.normal(size=[fixed_size(x) or size for x in spec.letters]).astype(dtype)
        for spec in inputs
        if not spec.optional
    }


def body_of(arrays: dict[str, Array], outputs: tuple[str, ...] = ("output",), **fields: Any) -> Any:
    """A body, and the bytes of its JSON."""
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    asked = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    chunks, length = v2.encode(Message({"outputs": asked} | fields, raw), "inputs", set(raw))
    return b"".join(chunks), length


def request_of(body: bytes, length: int, path: str = PATH, *lines: str) -> bytes:
    head = [
        f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}",
        f"{v2.LENGTH_HEADER}: {length}", *lines,
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Caller:
    """A plain connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._came = b""

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def answer(self) -> tuple[dict[str, str], Any, bytes]:
        """Headers, JSON and the bytes behind it, of the next answer."""
        while b"\r\n\r\n" not in self._came:
            self._more()
        head, self._came = self._came.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        assert first == "HTTP/1.1 200 OK", head + self._came
        headers = dict(line.split(": ", 1) for line in lines)
        while len(self._came) < int(headers["content-length"]):
            self._more()
        body, self._came = (
            self._came[: (end := int(headers["content-length"]))],
            self._came[end:],
        )
        length = int(headers["inference-header-content-length"])
        return headers, json.loads(body[:length]), body[length:]

    def status(self) -> int:
        """That of the next answer, which stays."""
        while b"\r\n\r\n" not in self._came:
            self._more()
        return int(self._came.split()[1])

    def body(self) -> bytes:
        """That of the next answer, which is good."""
        assert self.status() == 200, self._came
        return self.rest()

    def rest(self) -> bytes:
        """That of the next answer, whatever it is."""
        self.status()
        head, self._came = self._came.split(b"\r\n\r\n", 1)
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        while len(self._came) < length:
            self._more()
        body, self._came = self._came[:length], self._came[length:]
        return body

    def _more(self) -> None:
        more = self.socket.recv(1 << 20)
        assert more, "the connection was closed"
        self._came += more


@contextmanager
def calling(server: Server) -> Iterator[Caller]:
    with socket.create_connection(server.address, PATIENCE) as connection:
        yield Caller(connection)


@contextmanager
def asleep(server: Server) -> Iterator[None]:
    """The service's loop does not turn meanwhile: what is sent is read together."""
    assert server.engine._loop is not None
    held, go_on = threading.Event(), threading.Event()
    server.engine._loop.call_soon_threadsafe(held.set)
    server.engine._loop.call_soon_threadsafe(go_on.wait, PATIENCE)
    assert held.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()


def asked_of(server: Server) -> int:
    """Requests that the service counts as not answered."""
    return int(server.app.state.protocol.keywords["worker"].fleet.asked)


@pytest.mark.parametrize("name", sorted(variants()))
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_answer_is_that_of_the_long_way(
    server: Server, ran: list[Standing], name: str, dtype: str
) -> None:
    """Bytes, JSON but for the times, and headers."""
    variant = variants()[name]
    outputs = tuple(variant.outputs)
    numpy = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = inputs_of(name, numpy)
    assert all(array.nbytes % 64 == 0 for array in arrays.values())
    body, length = body_of(arrays, outputs, id="7")
    with calling(server) as caller:
        answers = []
        for _ in range(3):
            caller.send(request_of(body, length, f"/v2/models/{name}/infer"))
            answers.append(caller.answer())
    assert len(ran) >= 2
    for headers, said, data in answers:
        assert data == answers[0][2]
        assert set(headers) == set(answers[0][0])
        times = said.pop("parameters")
        assert {"queue_ms", "transfer_ms", "compute_ms", "total_ms"} < set(times)
        assert times["total_ms"] >= times["compute_ms"] > 0
        assert headers["server-timing"].startswith("queue;dur=")
    assert answers[0][1] == answers[1][1] == answers[2][1]


def test_other_numbers_have_their_own_answers(server: Server, ran: list[Standing]) -> None:
    limits = Limits(answer=1 << 30, request=1 << 30)
    with calling(server) as caller:
        for seed in range(30):
            arrays = drawn(seed)
            caller.send(request_of(*body_of(arrays)))
            tensors = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
            job = Job.of("softmax", Message({"outputs": ["output"]}, tensors), limits)
            (alone,) = run([job], torch.device("cpu"), False)
            assert caller.answer()[2] == alone.outputs["output"].data
    assert len(ran) >= 29


def wild(random: Any, shape: tuple[int, ...], size: float) -> Array:
    """Numbers of that size, some of them far from ordinary."""
    array = random.normal(size=shape).astype(np.float32) * np.float32(size)
    if size > 1:
        array.flat[random.integers(array.size)] = random.choice([3e38, -3e38, np.nan, np.inf, 2e19])
    return np.asarray(array)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_decided_once_has_the_bits_of_what_is_decided_each_time(dtype: str) -> None:
    """Heads, groups, parameters; and numbers for which it is to be decided anew."""
    random, limits = np.random.default_rng(0), Limits(answer=1 << 30, request=1 << 30)
    backends = []
    asked = (["output"], ["output"], ["output", "weights"], ["weights", "scores"])
    for turn in range(400):
        G, K, L, S, D = (int(random.choice([1, 2, 3, 7, 16, 33])) for _ in range(5))
        E = D if random.random() < 0.8 else D + 1
        shapes = (1, G * K, L, D), (1, G, S, D), (1, G, S, E)
        size = random.choice([1e-30, 1.0, 1.0, 1.0, 1e5])
        arrays = [wild(random, shape, size).astype(dtype) for shape in shapes]
        given = [
            {"causal": bool(random.random() < 0.5)}, {"scale": float(random.choice([0.3, -1, 0]))},
            {"window": [1, None]}, {"softcap": 3.0}, {"query_offset": 1, "causal": True}, {},
            {"query_offset": "end", "causal": True},
        ]  # fmt: skip
        buffer = memoryview(bytearray(b"".join(array.tobytes() for array in arrays)))
        tensors, at = {}, 0
        for name, array in zip(NAMES, arrays, strict=True):
            view = buffer[at : (at := at + array.nbytes)]
            tensors[name] = RawTensor(dtype, array.shape, view)
        outputs = asked[random.integers(len(asked))]
        fields = {"outputs": outputs, "parameters": given[turn % len(given)]}
        job = Job.of("softmax", Message(fields, tensors), limits)
        (alone,) = run([job], torch.device("cpu"), False)
        ready = Standing(job, buffer)
        for _ in range(2):
            again = ready.run()
            assert again.backend == alone.backend
            assert list(again.outputs) == list(alone.outputs)  # the order of a file's tensors
            for name in outputs:
                assert again.outputs[name].data == alone.outputs[name].data, (name, shapes)
        backends.append((outputs[0] == "output", ready._decided is not None, alone.backend))
    decided = {(is_first, backend) for is_first, is_decided, backend in backends if is_decided}
    assert decided == {(True, "sdpa"), (True, "explicit"), (False, "explicit")}
    assert {backend for _, is_decided, backend in backends if not is_decided} == {
        "sdpa",
        "explicit",
    }


def native_of(
    codec: Any, tensors: Mapping[str, RawTensor], path: str, *lines: str, **fields: Any
) -> bytes:
    """A request of the native API."""
    message = Message(fields, dict(tensors), encoding="base64")
    body = b"".join(codec.encode(message, "inputs"))
    head = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Type: {codec.MEDIA_TYPE}",
            f"Content-Length: {len(body)}", *lines]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("codec", [wire.json, wire.safetensors], ids=["base64", "safetensors"])
@pytest.mark.parametrize("kind", ["attention", "gradients"])
@pytest.mark.parametrize("name", sorted(variants()))
def test_the_native_api_has_it_too(
    server: Server, ran: list[Standing], codec: Any, kind: str, name: str
) -> None:
    """In base64 of any size, as bytes where all are aligned; two tensors may be the same."""
    variant, random = variants()[name], np.random.default_rng(0)
    size = 3 if codec is wire.json else 4
    group = "outputs" if kind == "attention" else "gradients"
    with calling(server) as caller:
        for turn in range(4):
            arrays = {
                n: np.asarray(random.normal(size=a.shape) if turn else np.ones(a.shape), "f4")
                for n, a in inputs_of(name, size=size).items()
            }
            raw = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
            fields: dict[str, Any] = {}
            if kind == "attention":
                fields = {"outputs": list(variant.outputs)}
            else:
                job = Job.of(name, Message({"outputs": ["output"]}, raw), Limits(1 << 30, 1 << 30))
                shape = job.answer_shape("output")
                raw["grad_output"] = RawTensor.from_numpy(random.normal(size=shape).astype("f4"))
            caller.send(native_of(codec, raw, f"/v1/{kind}/{name}", **fields))
            answer = codec.decode(caller.body(), group)
            caller.send(native_of(codec, raw, f"/v1/{kind}/{name}", "X-Long: way", **fields))
            expected = codec.decode(caller.body(), group)
            assert answer.tensors.keys() == expected.tensors.keys() != set()
            for n, tensor in answer.tensors.items():
                assert tensor.dtype == expected.tensors[n].dtype
                assert tensor.shape == expected.tensors[n].shape
                assert tensor.data == expected.tensors[n].data
            assert list(answer.fields) == list(expected.fields)
    assert len(ran) == 3


def test_base64_that_is_none_is_told_so_whatever_came_before(
    server: Server, ran: list[Standing]
) -> None:
    """A string that ends early, an escape, padding in the middle, letters that are none."""
    raw = {n: RawTensor.from_numpy(a) for n, a in drawn(0, (1, 1, 5, 3)).items()}
    request = native_of(wire.json, raw, "/v1/attention/softmax", outputs=["output"])
    text = pybase64.b64encode(raw["key"].data)
    with calling(server) as caller:
        for _ in range(3):
            caller.send(request)
            caller.body()
        assert len(ran) == 2
        for wrong in (b'","a":"', b"\\u0041", b"A=AA", b"\xff\xff", b"    ", b"\n\n\n\n", b"$"):
            broken = request.replace(text, wrong + text[len(wrong) :])
            assert len(broken) == len(request)
            assert broken != request
            http = server.http.post(
                "/v1/attention/softmax", content=broken.split(b"\r\n\r\n", 1)[1],
                headers={"Content-Type": "application/json"},
            )  # fmt: skip
            caller.send(broken)
            assert caller.status() == http.status_code
            assert json.loads(caller.rest()).keys() == http.json().keys()
        caller.send(request)
        caller.body()


def test_however_the_bytes_come(server: Server, ran: list[Standing]) -> None:
    """Cut anywhere, and many requests at once, to several paths."""
    requests = [
        request_of(*body_of(drawn(seed)), f"/v2/models/{name}/infer")
        for seed, name in enumerate(("softmax", "linear", "softmax", "efficient") * 3)
    ]
    with calling(server) as caller:
        whole = []
        for request in requests:
            caller.send(request)
            whole.append(caller.answer()[2])
        ran.clear()
        for size in (100, 999, 1400, 4000):
            for request, expected in zip(requests, whole, strict=True):
                caller.send(*(request[i : i + size] for i in range(0, len(request), size)))
                assert caller.answer()[2] == expected
        caller.send(b"".join(requests))
        assert [caller.answer()[2] for _ in requests] == whole
    assert len(ran) == len(requests) * 5
    until(lambda: asked_of(server) == 0)


@pytest.mark.parametrize(
    "line",
    [
        "Connection: close", "Accept-Encoding: gzip", "Expect: 100-continue", "X-Anything: 1",
        "Content-Encoding: identity", "Upgrade: websocket",
    ],
)  # fmt: skip
def test_what_asks_for_more_takes_the_long_way(
    server: Server, ran: list[Standing], line: str
) -> None:
    body, length = body_of(drawn(0))
    for _ in range(3):
        with socket.create_connection(server.address, PATIENCE) as connection:
            connection.sendall(request_of(body, length, PATH, line))
            answer = b""
            while b" 200 OK" not in answer:
                answer += (more := connection.recv(1 << 20))
                assert more, answer
    assert not ran


def test_what_changes_no_answer_changes_no_way(server: Server, ran: list[Standing]) -> None:
    request = [request_of(*body_of(drawn(0)), PATH, f"User-Agent: {i}") for i in range(4)]
    with calling(server) as caller:
        caller.send(request[0])
        first = caller.answer()[2]
        ran.clear()
        caller.send(*request)
        assert [caller.answer()[2] for _ in request] == [first] * 4
    assert len(ran) == 4


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("before", [1, 2])
def test_when_the_device_is_busy_it_waits_its_turn(
    server: Server, ran: list[Standing], before: int, others: int
) -> None:
    """However much of it a parser has seen, and the connection goes on."""
    body, length = body_of(drawn(0))
    request = request_of(body, length)
    head = len(request) - len(body)
    for cut in (0, head - 5, head, head + 9):
        with ExitStack() as stack:
            caller, *_ = [stack.enter_context(calling(server)) for _ in range(1 + others)]
            for _ in range(before):
                caller.send(request)
                first = caller.answer()[2]
            ran.clear()
            for _ in range(2):
                with server.engine.hold():
                    caller.send(request[:cut])
                    time.sleep(0.02)
                    caller.send(request[cut:])
                    server.await_waiting(1)
                headers, _, data = caller.answer()
                assert data == first
                assert "connection" not in headers
            assert not ran
            caller.send(request)
            assert caller.answer()[2] == first
            assert ran


def test_what_fails_there_is_told_so_by_the_long_way(
    server: Server, ran: list[Standing], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(*body_of(drawn(0)))
    with calling(server) as caller:
        caller.send(request)
        first = caller.answer()[2]
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Standing, "run", lambda _: 1 / 0)
            caller.send(request)
            assert caller.answer()[2] == first
        assert not ran
        caller.send(request)
        assert caller.answer()[2] == first
    assert len(ran) == 1


@pytest.mark.parametrize("step", ["run", "reply"])
def test_what_fails_there_is_answered_all_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """On a lone connection, and where others are open and it is answered a moment later."""
    request = request_of(*body_of(drawn(0)))
    for others in (0, 2):
        with ExitStack() as stack:
            callers = [stack.enter_context(calling(server)) for _ in range(1 + others)]
            caller = callers[0]
            caller.send(request)
            first = caller.answer()[2]
            with monkeypatch.context() as patch:
                patch.setattr(Shortcuts, step, lambda *_: 1 / 0)
                caller.send(request)
                assert caller.answer()[2] == first
            caller.send(request)
            assert caller.answer()[2] == first
    until(lambda: asked_of(server) == 0)


@pytest.mark.parametrize(("cached", "together"), [(None, 6), (2047, 2), (0, 1)])
def test_what_is_read_together_runs_together_and_is_answered_then(
    server: Server, monkeypatch: pytest.MonkeyPatch, cached: int | None, together: int
) -> None:
    """Each with its own numbers, though they lie in the same place one after the other; as many as
    a cache holds the answers of, which have 1,024 bytes each."""
    if cached is not None:
        monkeypatch.setattr("qkv.short._CACHED", cached)
    steps: list[str] = []
    for step in ("run", "reply"):
        method = getattr(Shortcuts, step)

        def noted(*args: Any, step: str = step, method: Any = method) -> Any:
            steps.append(step)
            return method(*args)

        monkeypatch.setattr(Shortcuts, step, noted)
    requests = [request_of(*body_of(drawn(seed))) for seed in range(6)]
    with ExitStack() as stack:
        callers = [stack.enter_context(calling(server)) for _ in requests]
        alone = []
        for caller, request in zip(callers, requests, strict=True):
            caller.send(request)
            alone.append(caller.answer()[2])
        steps.clear()
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert [caller.answer()[2] for caller in callers] == alone
    assert steps == (["run"] * together + ["reply"] * together) * (len(requests) // together)


def test_an_answer_that_cannot_be_written_costs_one_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of those that are answered with it."""
    requests = [
        request_of(*body_of(drawn(seed)), PATH, f"X-Request-ID: {seed}") for seed in range(3)
    ]
    write = Protocol._write

    def fails(protocol: Protocol, short: Short, reply: Reply) -> None:
        assert short.id != b"1"
        write(protocol, short, reply)

    with ExitStack() as stack:
        callers = [stack.enter_context(calling(server)) for _ in requests]
        alone = []
        for caller, request in zip(callers, requests, strict=True):
            caller.send(request)
            alone.append(caller.answer()[2])
        monkeypatch.setattr(Protocol, "_write", fails)
        with asleep(server):
            for caller, request in zip(callers, requests, strict=True):
                caller.send(request)
        assert callers[2].answer()[2] == alone[2]
        assert callers[0].answer()[2] == alone[0]
        with pytest.raises((AssertionError, ConnectionResetError)):  # closed
            callers[1].answer()
    until(lambda: asked_of(server) == 0)


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Requests that no parser has seen."""
    taken: list[bytes] = []
    take = Protocol._take_again

    def noted(connection: Protocol, head: Head, data: bytes) -> None:
        taken.append(data)
        take(connection, head, data)

    monkeypatch.setattr(Protocol, "_take_again", noted)
    return taken


def test_a_head_that_came_before_is_not_parsed_again(server: Server, unparsed: list[bytes]) -> None:
    """But its numbers are others, and so is every other head."""
    bodies = [body_of(drawn(seed)) for seed in range(8)]
    with calling(server) as caller:
        answers = []
        for body, length in bodies:
            caller.send(request_of(body, length, PATH, "X-Request-ID: mine"))
            answers.append(caller.answer())
        came = len(unparsed)
        assert came >= len(bodies) - 3
        for (body, length), (_, _, data) in zip(bodies, answers, strict=True):
            caller.send(request_of(body, length, PATH, f"X-Request-ID: {length}{data[:1].hex()}"))
            headers, _, again = caller.answer()
            assert again == data
            assert headers["x-request-id"] == f"{length}{data[:1].hex()}"
    assert all(headers["x-request-id"] == "mine" for headers, *_ in answers)
    causal, length = body_of(drawn(0), parameters={"causal": True})
    assert len({data for *_, data in answers}) == len(bodies)
    with calling(server) as caller:
        for _ in range(4):  # two kinds of body behind one connection, in turn
            caller.send(request_of(*bodies[0]))
            assert caller.answer()[2] == answers[0][2]
            caller.send(request_of(causal, length))
            assert caller.answer()[2] != answers[0][2]


@pytest.mark.parametrize("others", [0, 2])
def test_what_follows_a_head_that_came_before_is_read_as_ever(
    server: Server, unparsed: list[bytes], others: int
) -> None:
    """Cut anywhere, two at once, behind other requests, with garbage behind it."""
    body, length = body_of(drawn(0))
    request = request_of(body, length)
    with ExitStack() as stack:
        caller, *_ = [stack.enter_context(calling(server)) for _ in range(1 + others)]
        caller.send(request)
        first = caller.answer()[2]
        for _ in range(3):
            caller.send(request)
            assert caller.answer()[2] == first
        assert unparsed
        for cut in (1, 20, len(request) - len(body), len(request) - 1):
            caller.send(request[:cut])
            time.sleep(0.02)
            caller.send(request[cut:])
            assert caller.answer()[2] == first
        caller.send(request + request + request[:40])
        assert caller.answer()[2] == caller.answer()[2] == first
        caller.send(request[40:])
        assert caller.answer()[2] == first
        caller.send(b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n")
        assert caller.body()
        taken = len(unparsed)
        for _ in range(2):  # the first behind another kind of request is parsed
            caller.send(request)
            assert caller.answer()[2] == first
        assert len(unparsed) == taken + 1
        caller.send(request + b"\0\0")  # its answer is due all the same
        assert caller.answer()[2] == first
        assert caller.status() == 400


@pytest.mark.parametrize("step", ["run", "reply"])
@pytest.mark.parametrize("others", [0, 2])
def test_what_was_not_parsed_can_go_the_long_way(
    server: Server,
    unparsed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    others: int,
) -> None:
    request = request_of(*body_of(drawn(0)))
    received = server.app.state.protocol.keywords["observer"]._meter._totals
    with ExitStack() as stack:
        caller, *_ = [stack.enter_context(calling(server)) for _ in range(1 + others)]
        for _ in range(3):
            caller.send(request)
            first = caller.answer()[2]
        before, taken = received[0], len(unparsed)
        with monkeypatch.context() as patch:
            patch.setattr(Shortcuts, step, lambda *_: None if step == "run" else 1 / 0)
            caller.send(request)
            assert caller.answer()[2] == first
        assert len(unparsed) == taken + 1
        assert received[0] - before == len(body_of(drawn(0))[0])  # each byte is counted once
        caller.send(request)
        assert caller.answer()[2] == first
    until(lambda: asked_of(server) == 0)


def test_an_unloaded_model_has_no_short_way(serve: Callable[..., Server]) -> None:
    server = serve()
    request = request_of(*body_of(drawn(0)))
    with calling(server) as caller:
        caller.send(request, request)
        assert caller.answer()[2] == caller.answer()[2]
        assert server.http.post("/v2/repository/models/softmax/unload", json={}).status_code == 200
        caller.send(request)
        assert caller.socket.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


def test_large_bodies_come_whole_however_they_come(server: Server, ran: list[Standing]) -> None:
    """One after the other, many at once, in pieces, and with small ones between them."""
    large = [request_of(*body_of(drawn(seed, (1, 8, 256, 64)))) for seed in range(3)]
    small = [request_of(*body_of(drawn(seed))) for seed in range(3)]
    requests = [one for pair in zip(large, small, strict=True) for one in pair]
    expect = request_of(*body_of(drawn(0, (1, 8, 256, 64))), PATH, "Expect: 100-continue")
    with calling(server) as caller:
        whole = []
        for request in requests:
            caller.send(request)
            whole.append(caller.answer()[2])
        assert len(set(whole)) == 6
        caller.send(b"".join(requests))
        assert [caller.answer()[2] for _ in requests] == whole
        together = b"".join(requests)
        for size in (7_001, 65_537, 300_000):
            caller.send(*(together[i : i + size] for i in range(0, len(together), size)))
            assert [caller.answer()[2] for _ in requests] == whole
        end = expect.index(b"\r\n\r\n") + 4
        caller.send(expect[:end])
        assert caller.socket.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        caller.send(expect[end:])
        assert caller.answer()[2] == whole[0]
    for size in (1000, 100_000, 1_000_000):
        with calling(server) as caller:
            caller.send(large[0][:size])
            until(lambda: asked_of(server) == 1)
        until(lambda: asked_of(server) == 0)


@pytest.mark.parametrize("shape", [(1, 2, 8, 16), (1, 8, 128, 64), (1, 8, 1024, 32)])
def test_what_comes_in_pieces_is_counted_once(server: Server, shape: tuple[int, ...]) -> None:
    """By parsers or past them, with the next request close behind."""
    received = server.app.state.protocol.keywords["observer"]._meter._totals
    body, length = body_of(drawn(0, shape))
    request = request_of(body, length)
    head = len(request) - len(body)
    with calling(server) as caller:
        caller.send(request)
        first = caller.answer()[2]
        for cuts in ([head], [head + 9], [head + 1, head + 77], [head // 2, len(request) - 1]):
            before, ends = received[0], [0, *cuts, len(request)]
            for begin, end in itertools.pairwise(ends):
                caller.send(request[begin:end])
                time.sleep(0.02)
            assert caller.answer()[2] == first
            assert received[0] - before == len(body)
        caller.send(request[: head + 9])
        time.sleep(0.02)
        caller.send(request[head + 9 :] + request)
        assert caller.answer()[2] == caller.answer()[2] == first


def test_an_upgrade_that_is_not_made_reads_its_body_once(server: Server) -> None:
    """Its head is read twice, the second time without the wish."""
    body, length = body_of(drawn(0))
    request = request_of(body, length)
    wish = request_of(body, length, PATH, "Connection: upgrade", "Upgrade: h2c")
    door = server.engine.door
    with calling(server) as caller:
        for _ in range(2):
            caller.send(request)
            first = caller.answer()[2]
        for _ in range(2):
            caller.send(wish[: -len(body)])
            until(lambda: len(door.places) == 1)
            caller.send(body)
            assert caller.answer()[2] == first
            assert not door.places


def test_masks_whose_bytes_end_anywhere_are_answered(server: Server) -> None:
    """Together with the rest they are no whole number of float32."""
    arrays = drawn(0, (1, 1, 3, 16)) | {"mask": np.zeros((1, 3), np.float16)}
    with calling(server) as caller:
        answers = []
        for _ in range(3):
            caller.send(request_of(*body_of(arrays)))
            answers.append(caller.answer()[2])
    assert len(set(answers)) == 1


def test_a_head_by_itself_that_came_before_is_not_parsed_again(
    server: Server, unparsed: list[bytes]
) -> None:
    """As Python's clients send it."""
    body, length = body_of(drawn(0))
    request = request_of(body, length)
    head = request[: -len(body)]
    with calling(server) as caller:
        for _ in range(4):
            caller.send(head)
            time.sleep(0.02)
            caller.send(body)
            caller.answer()
    assert unparsed == [head, head]


def test_who_leaves_in_the_middle_is_forgotten(server: Server, ran: list[Standing]) -> None:
    request = request_of(*body_of(drawn(0)))
    with calling(server) as caller:
        caller.send(request)
        caller.answer()
    ran.clear()
    for _ in range(20):
        with calling(server) as caller:
            caller.send(request[:-100])
            until(lambda: asked_of(server) == 1)
        until(lambda: asked_of(server) == 0)
    assert not ran


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("shape", [(1, 2, 8, 16), (1, 8, 1024, 32)])
def test_a_body_that_comes_in_while_the_service_ends_is_answered(
    shape: tuple[int, ...], before: int
) -> None:
    """Whether a parser has seen its head, or that came before, or goes the long way."""
    request = request_of(*body_of(drawn(0, shape)))
    with running("serve", "--port", "0", "--workers", "1") as process:
        url = httpx.URL(process.url)
        assert url.port is not None
        with socket.create_connection((url.host, url.port), PATIENCE) as connection:
            caller = Caller(connection)
            for _ in range(before):
                caller.send(request)
                first = caller.answer()[2]
            caller.send(request[:-1000])
            time.sleep(0.2)  # for these bytes to be read
            process.popen.send_signal(signal.SIGTERM)
            time.sleep(1)  # it has closed what is idle by now
            caller.send(request[-1000:])
            assert caller.answer()[2] == first
        assert process.wait() == 0


def test_answers_that_nobody_reads_are_not_heaped_up(server: Server, ran: list[Standing]) -> None:
    """A caller that asks on without reading is not answered at once any more."""
    shape = (1, 8, 64, 64)
    request = request_of(*body_of(drawn(0, shape)))
    size, many = 8 * 64 * 64 * 4, 200
    with calling(server) as caller:
        caller.send(request)
        first = caller.answer()[2]
        caller.socket.settimeout(0.5)
        sent = 0
        try:
            for _ in range(many):
                caller.send(request)
                sent += 1
        except TimeoutError:  # nobody reads us either: as it should be
            pass
        assert sent < many
        heaped = len(ran) * size
        assert heaped < 32 << 20
    assert first
    until(lambda: asked_of(server) == 0)


def test_nothing_that_is_returned_lies_where_the_next_request_will() -> None:
    limits = Limits(answer=1 << 30, request=1 << 30)
    for name, variant in variants().items():
        tensors = {n: RawTensor.from_numpy(a) for n, a in inputs_of(name).items()}
        job = Job.of(name, Message({"outputs": list(variant.outputs)}, tensors), limits)
        standing = Standing(job)
        outputs = standing.run().outputs
        before = {n: bytes(t.data) for n, t in outputs.items()}
        for tensor in standing._tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(7)
        assert {n: bytes(t.data) for n, t in outputs.items()} == before


def test_few_are_kept(server: Server) -> None:
    """Of headers and of heads, however many come."""
    shortcuts: Shortcuts = server.app.state.protocol.keywords["shortcuts"]
    with calling(server) as caller:
        for i in range(40):
            caller.send(request_of(*body_of(drawn(0), id=f"{i:04}")))
            caller.answer()
        for i in range(300):
            caller.send(request_of(*body_of(drawn(0)), PATH, f"Accept: a/{i}"))
            caller.answer()
    assert len(shortcuts._known) <= 256
    assert all(len(known.plans) <= 16 for known in shortcuts._known.values())
    assert shortcuts.find(Asked(b"/", ())) is None


def test_what_is_kept_is_bounded_in_bytes(serve: Callable[..., Server]) -> None:
    """The longest heads, behind the longest headers: nobody can have a worker keep more than
    64 MiB so, and what is said in more words is not kept."""
    server = serve()
    shortcuts: Shortcuts = server.app.state.protocol.keywords["shortcuts"]

    def kept() -> int:
        gc.collect()
        return sum(len(known.plans) for known in shortcuts._known.values())

    def fill(letter: str, size: int) -> None:
        for i in range(100, 110):
            for j in range(100, 116):
                body, length = body_of(drawn(0), id=f"{i}{j}" + "x" * 3700)
                assert 3900 < length <= 4096
                caller.send(request_of(body, length, PATH, f"Accept: {i}{letter * size}"))
                caller.answer()

    with calling(server) as caller:
        fill("a", 3)  # so that what else is kept of heads is full
        before = kept()
        tracemalloc.start()
        fill("b", 3700)
        count = kept() - before
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        fill("c", 5000)
    assert count == 160
    assert held / count < (64 << 20) / (256 * 16)
    assert kept() == before + count


def test_a_connection_at_rest_is_closed_and_one_in_use_is_not() -> None:
    """uvicorn's time to ask again holds where answers go the shortest way too."""
    with serving(read_timeout_s=0.8) as server, calling(server) as caller:
        request = request_of(*body_of(drawn(0)))
        caller.send(request)
        caller.answer()
        (connection,) = server.app.state.protocol.keywords["watch"]._open
        connection.timeout_keep_alive = 1
        begun = time.monotonic()
        while time.monotonic() - begun < 2:
            caller.send(request)
            caller.answer()
            time.sleep(0.1)
        rested = time.monotonic()
        assert caller.socket.recv(1) == b""
        assert time.monotonic() - rested > 0.9
