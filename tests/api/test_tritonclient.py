"""Triton's own Python client, tritonclient[http], against a service of two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import qkv
from support.processes import TIMEOUT_S, Process
from support.service import running_server
from support.triton_client import (
    Array,
    infer_inputs,
    raises_inference_error,
    random_inputs,
    requested_outputs,
    triton_client,
)

pytestmark = pytest.mark.representative

WORKERS: Final = 2
FLOATS: Final = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
PARAMETERS: Final[
    list[tuple[dict[str, Any], dict[str, Any]]]
] = [  # datatype in the request, dtype of the array
    ({"causal": True}, {"causal": True}),
    ({"window": "[1, 0]"}, {"window": [1, 0]}),
    ({"window": " [null, 1]"}, {"window": [None, 1]}),
    ({"scale": 0.5, "softcap": 2.0}, {"scale": 0.5, "softcap": 2.0}),
    ({"dropout": 0.25, "seed": 7}, {"dropout": 0.25, "seed": 7}),
    ({"causal": True, "query_offset": "end"}, {"causal": True, "query_offset": "end"}),
    ({"causal": True, "query_offset": 1}, {"causal": True, "query_offset": 1}),
]


def same(found: Array | None, right: Any) -> bool:
    """Returns True if two arrays have the same bits."""
    return (
        found is not None
        and (found.dtype, found.shape) == (right.dtype, right.shape)
        and found.tobytes() == right.tobytes()
    )


@pytest.fixture(scope="module")
def service_process(shared_process: Callable[..., Process]) -> Process:
    return shared_process("--workers", str(WORKERS))


@pytest.fixture
def client(service_process: Process) -> Iterator[Any]:
    with triton_client(service_process.url) as opened:
        yield opened


@pytest.fixture
def native(service_process: Process) -> Iterator[qkv.Client]:
    with qkv.Client(service_process.url) as opened:
        yield opened


def test_server_metadata_and_health(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    about = client.get_server_metadata()
    assert (about["name"], about["version"]) == ("qkv", qkv.__version__)
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(about["extensions"])


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata_and_config(client: Any, version: str) -> None:
    assert client.is_model_ready("softmax", version)
    about = client.get_model_metadata("softmax", version)
    assert (about["name"], about["versions"]) == ("softmax", ["1"])
    inputs = {i["name"]: i for i in about["inputs"]}
    optional = ["mask", "key_lengths", "alibi_slopes", "sinks"]
    assert list(inputs) == ["query", "key", "value", *optional]
    assert inputs["query"]["shape"] == [-1] * 4
    assert [i["datatype"] for i in inputs.values()] == [
        "FP32", "FP32", "FP32", "BOOL", "INT64", "FP32", "FP32",
    ]  # fmt: skip
    assert [n for n, i in inputs.items() if i["parameters"]["optional"]] == optional
    outputs = {o["name"]: o["parameters"]["on_request"] for o in about["outputs"]}
    steps = {name: outputs.pop(name) for name in [*outputs] if name.startswith("steps.")}
    assert outputs == {"output": False, "weights": True, "scores": True}
    assert steps
    assert all(steps.values())
    config = client.get_model_config("softmax", version)
    assert (config["name"], config["max_batch_size"]) == ("softmax", 0)
    assert [i["name"] for i in config["input"]] == list(inputs)
    datatypes = [i["data_type"] for i in config["input"]]
    assert datatypes[2:5] == ["TYPE_FP32", "TYPE_BOOL", "TYPE_INT64"]
    assert datatypes[5:] == ["TYPE_FP32"] * 2
    assert config["instance_group"] == [{"name": "softmax", "kind": "KIND_CPU", "count": WORKERS}]
    (stats,) = client.get_inference_statistics("softmax", version)["model_stats"]
    assert (stats["name"], stats["version"]) == ("softmax", "1")


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_datatype_as_binary_and_json(client: Any, native: qkv.Client, dtype: Any) -> None:
    arrays = random_inputs(dtype)
    right = native.attend("softmax", **arrays, outputs=["output"]).output
    assert right is not None
    assert right.dtype == dtype
    forms: list[list[str] | None] = [None]
    if dtype != ml_dtypes.bfloat16:  # the client sends it as bytes only
        forms.append([])
    for binary in forms:
        for outputs in (None, True, False):  # None: the client asks for bytes
            requested = None if outputs is None else requested_outputs(output=outputs)
            result = client.infer("softmax", infer_inputs(arrays, binary), outputs=requested)
            assert same(result.as_numpy("output"), right)
            entry = result.get_output("output")
            assert ("data" in entry) == (outputs is False)
            assert entry["datatype"] == np_to_triton_dtype(np.dtype(dtype))


def test_binary_and_json_mixed_in_any_order(client: Any, native: qkv.Client) -> None:
    arrays = random_inputs()
    names = ["output", "weights", "scores"]
    right = native.attend("softmax", **arrays, outputs=names, causal=True)
    for order in (["query", "key", "value"], ["value", "query", "key"], ["key", "value", "query"]):
        inputs = {name: arrays[name] for name in order}
        for binary in ([], ["key"], ["query", "value"], order):
            for chosen in ({"scores": False, "output": True}, {"output": False, "weights": True}):
                requested = requested_outputs(**chosen)
                result = client.infer(
                    "softmax",
                    infer_inputs(inputs, binary),
                    outputs=requested,
                    parameters={"causal": True},
                )
                entries = result.get_response()["outputs"]
                assert [o["name"] for o in entries] == list(chosen)
                assert ["data" not in o for o in entries] == list(chosen.values())
                only = native.attend("softmax", **arrays, outputs=list(chosen), causal=True)
                for name in chosen:
                    assert same(result.as_numpy(name), getattr(only, name))
    assert np.isneginf(right.scores).any()  # JSON has no such number


@pytest.mark.parametrize(("as_sent", "as_is"), PARAMETERS)
def test_parameters(
    client: Any, native: qkv.Client, as_sent: dict[str, Any], as_is: dict[str, Any]
) -> None:
    arrays = random_inputs()
    for names in (["output"], ["output", "weights"]):
        right = native.attend("softmax", **arrays, **as_is, outputs=names)
        requested = requested_outputs(**dict.fromkeys(names, True))
        result = client.infer(
            "softmax", infer_inputs(arrays), outputs=requested, parameters=as_sent
        )
        for name in names:
            assert same(result.as_numpy(name), getattr(right, name))
    plain = native.attend("softmax", **arrays, outputs=["output", "weights"]).weights
    assert not same(plain, right.weights)  # each parameter changes the output


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "lengths"])
def test_masks(client: Any, native: qkv.Client, kind: str, binary: bool) -> None:
    arrays, draw = random_inputs(), np.random.default_rng(1)
    if kind == "bool":
        arrays["mask"] = draw.random((2, 1, 5, 7)) < 0.6
    elif kind == "float":
        arrays["mask"] = draw.normal(size=(2, 4, 5, 7)).astype(np.float32)
        arrays["mask"][:, :, 2, 3:] = -np.inf  # the client writes it without quotes in JSON
    else:
        arrays["key_lengths"] = np.array([3, 7])
    right = native.attend("softmax", **arrays, outputs=["output"]).output
    result = client.infer(
        "softmax", infer_inputs(arrays, None if binary else list(random_inputs()))
    )
    assert same(result.as_numpy("output"), right)
    del arrays[list(arrays)[-1]]
    assert not same(native.attend("softmax", **arrays, outputs=["output"]).output, right)


@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("answer_coding", [None, "gzip", "deflate"])
def test_compression(
    client: Any, native: qkv.Client, request_coding: str | None, answer_coding: str | None
) -> None:
    arrays = random_inputs()
    right = native.attend("softmax", **arrays, outputs=["output"]).output
    for binary in (None, ["key"], []):
        for outputs in (requested_outputs(output=True), requested_outputs(output=False)):
            result = client.infer(
                "softmax",
                infer_inputs(arrays, binary),
                outputs=outputs,
                request_compression_algorithm=request_coding,
                response_compression_algorithm=answer_coding,
            )
            assert same(result.as_numpy("output"), right)


def test_id_priority_timeout_and_timing(client: Any) -> None:
    for name in ("7", 'a "b" \\ é 日本 \0'):
        result = client.infer(
            "softmax", infer_inputs(random_inputs()), request_id=name
        ).get_response()
        assert result["id"] == name
    for chosen in ({"priority": 1}, {"priority": 9}, {"timeout": 10**12}, {"timeout": 2**63 - 1}):
        result = client.infer(
            "softmax", infer_inputs(random_inputs()), model_version="1", **chosen
        ).get_response()
        assert (result["model_name"], result["model_version"]) == ("softmax", "1")
        assert "id" not in result
        times = [result["parameters"][f"{stage}_ms"] for stage in ("queue", "transfer", "compute")]
        assert 0 < sum(times) <= result["parameters"]["total_ms"]


def test_generated_request_body_is_accepted(service_process: Process, native: qkv.Client) -> None:
    arrays = random_inputs()
    body, length = triton.InferenceServerClient.generate_request_body(infer_inputs(arrays, ["key"]))
    headers = {"Inference-Header-Content-Length": str(length)}
    url = f"{service_process.url}/v2/models/softmax/infer"
    response = httpx.post(url, content=body, headers=headers, timeout=TIMEOUT_S)
    result = triton.InferenceServerClient.parse_response_body(
        response.content, header_length=int(response.headers["Inference-Header-Content-Length"])
    )
    right = native.attend("softmax", **arrays, outputs=["output"]).output
    assert same(result.as_numpy("output"), right)


def test_async_infer(service_process: Process, native: qkv.Client) -> None:
    with closing(
        triton.InferenceServerClient(service_process.url.removeprefix("http://"), concurrency=4)
    ) as client:
        inputs = [random_inputs(seed=seed) for seed in range(8)]
        running_ = [client.async_infer("softmax", infer_inputs(arrays)) for arrays in inputs]
        wrong = client.async_infer("softmax", infer_inputs(inputs[0])[:2])
        for arrays, one in zip(inputs, running_, strict=True):
            right = native.attend("softmax", **arrays, outputs=["output"]).output
            assert same(one.get_result().as_numpy("output"), right)
        with raises_inference_error("softmax needs value"):
            wrong.get_result()


def test_asyncio_client(service_process: Process, native: qkv.Client) -> None:
    inputs = [random_inputs(seed=seed) for seed in range(8)]

    async def all_of_them() -> list[Any]:
        async with aio.InferenceServerClient(service_process.url.removeprefix("http://")) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("softmax")
            assert (await client.get_server_metadata())["name"] == "qkv"
            assert (await client.get_model_metadata("softmax"))["name"] == "softmax"
            assert (await client.get_model_config("softmax"))["backend"] == "qkv"
            assert (await client.get_model_repository_index())[0]["state"] == "READY"
            assert (await client.get_inference_statistics())["model_stats"]
            await client.load_model("softmax")
            with raises_inference_error("no parameter 'windw'"):
                await client.infer("softmax", infer_inputs(inputs[0]), parameters={"windw": 1})
            codings: list[Any] = [None, "gzip", "deflate"]
            return await asyncio.gather(
                *(
                    client.infer(
                        "softmax",
                        infer_inputs(arrays, [None, ["key"], []][i % 3]),
                        request_compression_algorithm=codings[i % 3],
                        response_compression_algorithm=codings[i % 2],
                    )
                    for i, arrays in enumerate(inputs)
                )
            )

    for arrays, result in zip(inputs, asyncio.run(all_of_them()), strict=True):
        right = native.attend("softmax", **arrays, outputs=["output"]).output
        assert same(result.as_numpy("output"), right)


Call = Callable[[Any], object]


def asking(inputs: list[Any] | None = None, model: str = "softmax", **more: Any) -> Call:
    return lambda client: client.infer(model, inputs or infer_inputs(random_inputs()), **more)


REFUSED: Final[list[tuple[Call, str, int]]] = [
    (asking(model="nope"), "unknown model: 'nope' is not found", 404),
    (asking(model_version="2"), "'softmax' version '2' is not found; there is version 1", 404),
    (asking(sequence_id=3), "sequence_id is not supported: no model keeps state", 400),
    (
        asking(outputs=[triton.InferRequestedOutput("output", class_count=2)]),
        "'classification', expected binary_data",
        400,
    ),
    (lambda c: c.load_model("softmax", config="{}"), "parameter 'config' is not supported", 400),
    (
        lambda c: c.load_model("softmax", files={"file:1/a": b""}),
        "'file:1/a' is not supported",
        400,
    ),
    (lambda c: c.get_log_settings(), "path /v2/logging does not exist", 404),
]
"""What this client alone sends, and two more that show that it raises what the service says."""


@pytest.mark.parametrize(("call", "message", "status"), REFUSED)
def test_client_raises_the_error_of_the_service(
    client: Any, call: Call, message: str, status: int
) -> None:
    with raises_inference_error(message, status):
        call(client)


def test_shared_memory_is_rejected(client: Any) -> None:
    inputs = infer_inputs(random_inputs())
    inputs[0].set_shared_memory("region", 1280)
    with raises_inference_error("query is in shared memory"):
        client.infer("softmax", inputs)
    (output,) = requested_outputs(output=True)
    output.set_shared_memory("region", 1280)
    with raises_inference_error("classification and shared memory are not supported"):
        client.infer("softmax", infer_inputs(random_inputs()), outputs=[output])


def test_key_is_sent_in_headers() -> None:
    """As in docs/open-inference-protocol.md."""
    key = "a-key.0123456789"
    headers = {"Authorization": f"Bearer {key}"}
    arrays = random_inputs()
    calls: list[Callable[..., Any]] = []
    with (
        running_server(api_keys=f"another-0123456789,{key}") as server,
        triton_client(server.url) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        calls += [
            lambda **more: client.infer("softmax", infer_inputs(arrays), **more),
            lambda **more: client.async_infer("softmax", infer_inputs(arrays), **more).get_result(),
            lambda **more: client.get_model_metadata("softmax", **more),
            lambda **more: client.get_inference_statistics("softmax", **more),
            lambda **more: client.load_model("softmax", **more),
        ]
        for call in calls:
            call(headers=headers)
            for wrong in (None, {"Authorization": "Bearer wrong"}):
                with pytest.raises(InferenceServerException) as refused:
                    call(headers=wrong)
                assert refused.value.status() == "401"
        with qkv.Client(server.url, api_key=key) as native:
            right = native.attend("softmax", weights="none", **arrays).output
        for _ in range(3):
            result = client.infer("softmax", infer_inputs(arrays), headers=headers)
            assert same(result.as_numpy("output"), right)

        async def ask() -> Any:
            async with aio.InferenceServerClient(server.url.removeprefix("http://")) as other:
                with pytest.raises(InferenceServerException, match="401"):
                    await other.infer("softmax", infer_inputs(arrays))
                return await other.infer("softmax", infer_inputs(arrays), headers=headers)

        assert same(asyncio.run(ask()).as_numpy("output"), right)
