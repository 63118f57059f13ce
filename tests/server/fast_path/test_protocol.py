"""The shortest way that a request may take ends where the others do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pybase64
import pytest
import torch

from qkv import wire
from qkv.api.fast_path.run_cache import RunCache
from qkv.attention.catalogue import variants
from qkv.engine.executor import PreparedRun, execute
from qkv.jobs.job import Job, Limits
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.known_requests import Array
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    NAMES,
    PATH,
    encode_body,
    encode_request,
    in_flight_count,
    inputs_for,
    random_inputs,
    raw_client,
)
from support.raw_connection import fast_path_runs as fast_path_runs
from support.service import Server


@pytest.mark.parametrize("name", sorted(variants()))
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_answer_is_that_of_the_long_way(
    server: Server, fast_path_runs: list[PreparedRun], name: str, dtype: str
) -> None:
    """Bytes, JSON but for the times, and headers."""
    variant = variants()[name]
    outputs = tuple(variant.outputs)
    numpy = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = inputs_for(name, numpy)
    assert all(array.nbytes % 64 == 0 for array in arrays.values())
    body, length = encode_body(arrays, outputs, id="7")
    with raw_client(server) as caller:
        answers = []
        for _ in range(3):
            caller.send(encode_request(body, length, f"/v2/models/{name}/infer"))
            answers.append(caller.read_response())
    assert len(fast_path_runs) >= 2
    for headers, said, data in answers:
        assert data == answers[0][2]
        assert set(headers) == set(answers[0][0])
        times = said.pop("parameters")
        assert {"queue_ms", "transfer_ms", "compute_ms", "total_ms"} < set(times)
        assert times["total_ms"] >= times["compute_ms"] > 0
        assert headers["server-timing"].startswith("queue;dur=")
    assert answers[0][1] == answers[1][1] == answers[2][1]


def test_other_numbers_have_their_own_answers(
    server: Server, fast_path_runs: list[PreparedRun]
) -> None:
    limits = Limits(response_bytes=1 << 30, job_bytes=1 << 30)
    with raw_client(server) as caller:
        for seed in range(30):
            arrays = random_inputs(seed)
            caller.send(encode_request(*encode_body(arrays)))
            tensors = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
            job = Job.from_message("softmax", Message({"outputs": ["output"]}, tensors), limits)
            (alone,) = execute([job], torch.device("cpu"), False)
            assert caller.read_response()[2] == alone.outputs["output"].data
    assert len(fast_path_runs) >= 29


def wild(random: Any, shape: tuple[int, ...], size: float) -> Array:
    """Numbers of that size, some of them far from ordinary."""
    array = random.normal(size=shape).astype(np.float32) * np.float32(size)
    if size > 1:
        array.flat[random.integers(array.size)] = random.choice([3e38, -3e38, np.nan, np.inf, 2e19])
    return np.asarray(array)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_decided_once_has_the_bits_of_what_is_decided_each_time(dtype: str) -> None:
    """Heads, groups, parameters; and numbers for which it is to be decided anew."""
    random, limits = np.random.default_rng(0), Limits(response_bytes=1 << 30, job_bytes=1 << 30)
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
        job = Job.from_message("softmax", Message(fields, tensors), limits)
        (alone,) = execute([job], torch.device("cpu"), False)
        ready = PreparedRun(job, buffer)
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
    server: Server, fast_path_runs: list[PreparedRun], codec: Any, kind: str, name: str
) -> None:
    """In base64 of any size, as bytes where all are aligned; two tensors may be the same."""
    variant, random = variants()[name], np.random.default_rng(0)
    size = 3 if codec is wire.json else 4
    group = "outputs" if kind == "attention" else "gradients"
    with raw_client(server) as caller:
        for turn in range(4):
            arrays = {
                n: np.asarray(random.normal(size=a.shape) if turn else np.ones(a.shape), "f4")
                for n, a in inputs_for(name, size=size).items()
            }
            raw = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
            fields: dict[str, Any] = {}
            if kind == "attention":
                fields = {"outputs": list(variant.outputs)}
            else:
                job = Job.from_message(
                    name, Message({"outputs": ["output"]}, raw), Limits(1 << 30, 1 << 30)
                )
                shape = job.output_shape("output")
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
    assert len(fast_path_runs) == 3


def test_base64_that_is_none_is_told_so_whatever_came_before(
    server: Server, fast_path_runs: list[PreparedRun]
) -> None:
    """A string that ends early, an escape, padding in the middle, letters that are none."""
    raw = {n: RawTensor.from_numpy(a) for n, a in random_inputs(0, (1, 1, 5, 3)).items()}
    request = native_of(wire.json, raw, "/v1/attention/softmax", outputs=["output"])
    text = pybase64.b64encode(raw["key"].data)
    with raw_client(server) as caller:
        for _ in range(3):
            caller.send(request)
            caller.body()
        assert len(fast_path_runs) == 2
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


@pytest.mark.parametrize(
    "line",
    [
        "Connection: close", "Accept-Encoding: gzip", "Expect: 100-continue", "X-Anything: 1",
        "Content-Encoding: identity", "Upgrade: websocket",
    ],
)  # fmt: skip
def test_what_asks_for_more_takes_the_long_way(
    server: Server, fast_path_runs: list[PreparedRun], line: str
) -> None:
    body, length = encode_body(random_inputs(0))
    for _ in range(3):
        with socket.create_connection(server.address, TIMEOUT_S) as connection:
            connection.sendall(encode_request(body, length, PATH, line))
            answer = b""
            while b" 200 OK" not in answer:
                answer += (more := connection.recv(1 << 20))
                assert more, answer
    assert not fast_path_runs


def test_what_changes_no_answer_changes_no_way(
    server: Server, fast_path_runs: list[PreparedRun]
) -> None:
    request = [
        encode_request(*encode_body(random_inputs(0)), PATH, f"User-Agent: {i}") for i in range(4)
    ]
    with raw_client(server) as caller:
        caller.send(request[0])
        first = caller.read_response()[2]
        fast_path_runs.clear()
        caller.send(*request)
        assert [caller.read_response()[2] for _ in request] == [first] * 4
    assert len(fast_path_runs) == 4


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("before", [1, 2])
def test_when_the_device_is_busy_it_waits_its_turn(
    server: Server, fast_path_runs: list[PreparedRun], before: int, others: int
) -> None:
    """However much of it a parser has seen, and the connection goes on."""
    body, length = encode_body(random_inputs(0))
    request = encode_request(body, length)
    head = len(request) - len(body)
    for cut in (0, head - 5, head, head + 9):
        with ExitStack() as stack:
            caller, *_ = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
            for _ in range(before):
                caller.send(request)
                first = caller.read_response()[2]
            fast_path_runs.clear()
            for _ in range(2):
                with server.hold():
                    caller.send(request[:cut])
                    time.sleep(0.02)
                    caller.send(request[cut:])
                    server.wait_until_queued(1)
                headers, _, data = caller.read_response()
                assert data == first
                assert "connection" not in headers
            assert not fast_path_runs
            caller.send(request)
            assert caller.read_response()[2] == first
            assert fast_path_runs


def test_what_fails_there_is_told_so_by_the_long_way(
    server: Server, fast_path_runs: list[PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = encode_request(*encode_body(random_inputs(0)))
    with raw_client(server) as caller:
        caller.send(request)
        first = caller.read_response()[2]
        fast_path_runs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(PreparedRun, "run", lambda _: 1 / 0)
            caller.send(request)
            assert caller.read_response()[2] == first
        assert not fast_path_runs
        caller.send(request)
        assert caller.read_response()[2] == first
    assert len(fast_path_runs) == 1


@pytest.mark.parametrize("step", ["run", "reply"])
def test_what_fails_there_is_answered_all_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """On a lone connection, and where others are open and it is answered a moment later."""
    request = encode_request(*encode_body(random_inputs(0)))
    for others in (0, 2):
        with ExitStack() as stack:
            callers = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
            caller = callers[0]
            caller.send(request)
            first = caller.read_response()[2]
            with monkeypatch.context() as patch:
                patch.setattr(RunCache, step, lambda *_: 1 / 0)
                caller.send(request)
                assert caller.read_response()[2] == first
            caller.send(request)
            assert caller.read_response()[2] == first
    wait_until(lambda: in_flight_count(server) == 0)


def test_an_unloaded_model_has_no_short_way(serve: Callable[..., Server]) -> None:
    server = serve()
    request = encode_request(*encode_body(random_inputs(0)))
    with raw_client(server) as caller:
        caller.send(request, request)
        assert caller.read_response()[2] == caller.read_response()[2]
        assert server.http.post("/v2/repository/models/softmax/unload", json={}).status_code == 200
        caller.send(request)
        assert caller.socket.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


def test_masks_whose_bytes_end_anywhere_are_answered(server: Server) -> None:
    """Together with the rest they are no whole number of float32."""
    arrays = random_inputs(0, (1, 1, 3, 16)) | {"mask": np.zeros((1, 3), np.float16)}
    with raw_client(server) as caller:
        answers = []
        for _ in range(3):
            caller.send(encode_request(*encode_body(arrays)))
            answers.append(caller.read_response()[2])
    assert len(set(answers)) == 1


def test_nothing_that_is_returned_lies_where_the_next_request_will() -> None:
    limits = Limits(response_bytes=1 << 30, job_bytes=1 << 30)
    for name, variant in variants().items():
        tensors = {n: RawTensor.from_numpy(a) for n, a in inputs_for(name).items()}
        job = Job.from_message(name, Message({"outputs": list(variant.outputs)}, tensors), limits)
        prepared_run = PreparedRun(job)
        outputs = prepared_run.run().outputs
        before = {n: bytes(t.data) for n, t in outputs.items()}
        for tensor in prepared_run._tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(7)
        assert {n: bytes(t.data) for n, t in outputs.items()} == before
