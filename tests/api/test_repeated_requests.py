"""Requests of one form many times: each has its own output, and each is checked anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pybase64
import pytest

from qkv import Client
from qkv.attention.catalogue import variants
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.plan import Plan
from qkv.tensors import RawTensor
from qkv.wire import json as json_codec
from qkv.wire import open_inference, safetensors
from qkv.wire.message import Message
from support.engines import output_alone, run_alone
from support.known_requests import Array
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    inputs_for,
    random_inputs,
    raw_client,
)
from support.service import Server

ATTENTION = "/v1/attention/softmax"


def infer(server: Server, arrays: Mapping[str, Array], path: str = PATH, **fields: Any) -> Any:
    body, length = encode_body(dict(arrays), **fields)
    headers = {open_inference.LENGTH_HEADER: str(length)}
    return server.http.post(path, content=body, headers=headers)


def output(response: httpx.Response) -> bytes:
    assert response.status_code == 200, response.text
    return response.content[int(response.headers[open_inference.LENGTH_HEADER]) :]


# ---------------------------------------------------------------- the Open Inference Protocol


@pytest.mark.parametrize("name", sorted(variants()))
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_repeated_request_has_the_same_response(server: Server, name: str, dtype: str) -> None:
    """Bytes as of the job alone; JSON, except for times; headers."""
    variant = variants()[name]
    outputs = tuple(variant.outputs)
    arrays = inputs_for(name, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    body, length = encode_body(arrays, outputs, id="7")
    alone = run_alone(arrays, name, outputs=list(outputs))
    with raw_client(server) as caller:
        responses = []
        for _ in range(3):
            caller.send(encode_request(body, length, f"/v2/models/{name}/infer"))
            responses.append(caller.read_response())
    for headers, document, data in responses:
        assert data == b"".join(alone[n].data for n in outputs)
        assert set(headers) == set(responses[0][0])
        times = document.pop("parameters")
        assert {"queue_ms", "transfer_ms", "compute_ms", "total_ms"} < set(times)
        assert times["total_ms"] >= times["compute_ms"] > 0
        assert headers["server-timing"].startswith("queue;dur=")
        assert document["id"] == "7"
        assert document == responses[0][1]


def test_other_numbers_have_their_own_outputs(server: Server) -> None:
    with Client(server.url) as client, raw_client(server) as caller:
        for seed in range(30):
            arrays = random_inputs(seed)
            caller.send(encode_request(*encode_body(arrays)))
            data = caller.read_response()[2]
            assert data == output_alone(arrays) == output(infer(server, arrays))
            native = client.attend("softmax", **arrays, weights="none").output
            assert data == native.tobytes()


def test_parameters_ids_and_shapes_are_those_of_the_request(server: Server) -> None:
    """Also when requests with others come in between."""
    arrays, ids = random_inputs(0), [f"id {i}" for i in range(3)]
    plain, causal = output_alone(arrays), output_alone(arrays, causal=True)
    assert plain != causal
    for _ in range(3):
        assert output(infer(server, arrays)) == plain
        assert output(infer(server, arrays, parameters={"causal": True})) == causal
        for id in ids:
            response = infer(server, arrays, id=id)
            length = int(response.headers[open_inference.LENGTH_HEADER])
            assert json.loads(response.content[:length])["id"] == id
            assert output(response) == plain
    longer = random_inputs(1, (1, 2, 6, 4))
    assert output(infer(server, longer)) == output(infer(server, longer)) == output_alone(longer)


@pytest.mark.parametrize("more", [-1, 1])
def test_body_of_the_wrong_length_gets_400_every_time(server: Server, more: int) -> None:
    body, length = encode_body(random_inputs(0))
    headers = {open_inference.LENGTH_HEADER: str(length)}
    for _ in range(3):
        assert server.http.post(PATH, content=body, headers=headers).status_code == 200
        wrong = body[:more] if more < 0 else body + b"\0"
        assert server.http.post(PATH, content=wrong, headers=headers).status_code == 400


def test_key_lengths_and_booleans_are_checked_every_time(server: Server) -> None:
    """Lengths above S, and bytes other than 0 and 1, after valid ones in the same place."""
    arrays = random_inputs(0, (1, 2, 5, 4))
    good = arrays | {"key_lengths": np.array([3])}
    bad = arrays | {"key_lengths": np.array([9])}
    mask = np.ones((5, 5), np.bool_)
    two = np.full((5, 5), 2, np.uint8).view(np.bool_)
    for _ in range(3):
        assert output(infer(server, good)) == output_alone(good)
        assert infer(server, bad).status_code == 400
        assert output(infer(server, arrays | {"mask": mask})) == output_alone(arrays)
        assert infer(server, arrays | {"mask": two}).status_code == 400


def test_unloaded_model_gets_404_after_it_has_run(serve: Callable[..., Server]) -> None:
    server = serve()
    for change, status in (("load", 200), ("unload", 404), ("load", 200)):
        changed = server.http.post(f"/v2/repository/models/softmax/{change}", json={})
        assert changed.status_code == 200
        for _ in range(2):
            assert infer(server, random_inputs(0)).status_code == status


# ---------------------------------------------------------------- the native API


def encode_native(codec: Any, tensors: Mapping[str, RawTensor], path: str, **fields: Any) -> bytes:
    """Returns a request of the native API."""
    message = Message(fields, dict(tensors), encoding="base64")
    body = b"".join(codec.encode(message, "inputs"))
    head = [
        f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {codec.MEDIA_TYPE}",
        f"Content-Length: {len(body)}",
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("codec", [json_codec, safetensors], ids=["base64", "safetensors"])
@pytest.mark.parametrize("kind", [Plan, GradientPlan])
@pytest.mark.parametrize("name", sorted(variants()))
def test_native_request_has_the_outputs_of_the_job_alone(
    server: Server, codec: Any, kind: type[Plan], name: str
) -> None:
    """In base64 of any size, and as bytes that are aligned; with other numbers each time."""
    variant, random = variants()[name], np.random.default_rng(0)
    is_run = kind is Plan
    group, path = ("outputs", "attention") if is_run else ("gradients", "gradients")
    fields: dict[str, Any] = {"outputs": list(variant.outputs)} if is_run else {}
    with raw_client(server) as caller:
        for turn in range(4):
            arrays = {
                n: np.asarray(random.normal(size=a.shape) if turn else np.ones(a.shape), "f4")
                for n, a in inputs_for(name, size=3 if codec is json_codec else 4).items()
            }
            if not is_run:
                shape = run_alone(arrays, name, outputs=["output"])["output"].shape
                arrays["grad_output"] = random.normal(size=shape).astype("f4")
            raw = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
            caller.send(encode_native(codec, raw, f"/v1/{path}/{name}", **fields))
            response = codec.decode(caller.body(), group)
            alone = run_alone(arrays, name, kind, **fields)
            assert response.tensors.keys() == alone.keys() != set()
            for n, tensor in response.tensors.items():
                assert (tensor.dtype, tensor.shape) == (alone[n].dtype, alone[n].shape)
                assert tensor.data == alone[n].data


def test_invalid_base64_is_rejected_every_time(server: Server) -> None:
    """A string that ends early, an escape, padding in the middle, invalid characters."""
    raw = {n: RawTensor.from_numpy(a) for n, a in random_inputs(0, (1, 1, 5, 3)).items()}
    request = encode_native(json_codec, raw, ATTENTION, outputs=["output"])
    text = pybase64.b64encode(raw["key"].data)
    with raw_client(server) as caller:
        for wrong in (b'","a":"', b"\\u0041", b"A=AA", b"\xff\xff", b"    ", b"\n\n\n\n", b"$"):
            caller.send(request)
            caller.body()
            broken = request.replace(text, wrong + text[len(wrong) :])
            assert len(broken) == len(request)
            assert broken != request
            for _ in range(2):
                caller.send(broken)
                assert caller.status() in (400, 422)
                assert json.loads(caller.rest())["detail"]
