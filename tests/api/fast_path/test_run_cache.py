"""The shorter ways that a request may take lead where the long ones do: a head that came before,
small jobs on the loop itself, more threads where nobody else wants them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from qkv import Client
from qkv.api.fast_path.job_cache import JobCache
from qkv.attention.catalogue import variants
from qkv.engine.engine import Engine, JobResult
from qkv.engine.executor import execute
from qkv.errors import Internal, ServiceUnavailable
from qkv.jobs.job import Job, Limits
from qkv.tensors import RawTensor
from qkv.wire import open_inference
from qkv.wire.message import Message
from support.engines import bits, hold
from support.known_requests import DTYPES
from support.processes import wait_until
from support.service import Server

Array = np.ndarray[Any, Any]

LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=4 << 30)
CPU: Final = torch.device("cpu")
INFER: Final = "/v2/models/softmax/infer"
NAMES: Final = ("query", "key", "value")


def drawn(seed: int, shape: tuple[int, ...] = (1, 2, 5, 4)) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name in NAMES}


def written(arrays: Mapping[str, Array], **fields: Any) -> tuple[bytes, dict[str, str]]:
    """A body of the Open Inference Protocol, and its headers."""
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    outputs = [{"name": "output", "parameters": {"binary_data": True}}]
    chunks, length = open_inference.encode(
        Message({"outputs": outputs} | fields, raw), "inputs", set(raw)
    )
    return b"".join(chunks), {open_inference.LENGTH_HEADER: str(length)}


def infer(server: Server, arrays: Mapping[str, Array], path: str = INFER, **fields: Any) -> Any:
    body, headers = written(arrays, **fields)
    return server.http.post(path, content=body, headers=headers)


def output(response: httpx.Response) -> bytes:
    assert response.status_code == 200, response.text
    return response.content[int(response.headers[open_inference.LENGTH_HEADER]) :]


def job_of(arrays: Mapping[str, Array], variant: str = "softmax", **fields: Any) -> Job:
    tensors = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
    return Job.from_message(variant, Message({"outputs": ["output"]} | fields, tensors), LIMITS)


# ---------------------------------------------------------------- a head that has come before


def test_other_numbers_behind_one_head_have_their_own_answers(server: Server) -> None:
    with Client(server.url) as client:
        for seed in range(12):
            arrays = drawn(seed)
            native = client.attend("softmax", **arrays, weights="none").output
            assert output(infer(server, arrays)) == native.tobytes()


def test_what_else_the_head_says_is_heeded(server: Server) -> None:
    """Parameters, order of the outputs, ids, shapes: each has a head of its own."""
    arrays, ids = drawn(0), [f"id {i}" for i in range(3)]
    plain = output(infer(server, arrays))
    causal = output(infer(server, arrays, parameters={"causal": True}))
    for _ in range(3):
        assert output(infer(server, arrays)) == plain != causal
        assert output(infer(server, arrays, parameters={"causal": True})) == causal
        for name in ids:
            answer = infer(server, arrays, id=name)
            length = int(answer.headers[open_inference.LENGTH_HEADER])
            assert json.loads(answer.content[:length])["id"] == name
            assert output(answer) == plain
    longer = drawn(1, (1, 2, 6, 4))
    assert output(infer(server, longer)) == output(infer(server, longer))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_body_of_another_length_is_refused_as_ever(server: Server, more: int) -> None:
    body, headers = written(drawn(0))
    for _ in range(3):
        assert server.http.post(INFER, content=body, headers=headers).status_code == 200
        wrong = body[:more] if more < 0 else body + b"\0"
        assert server.http.post(INFER, content=wrong, headers=headers).status_code == 400


def test_numbers_that_are_checked_are_checked_every_time(server: Server) -> None:
    """Lengths past S, and booleans that are none, behind a head that was good before."""
    good = drawn(0) | {"key_lengths": np.array([3])}
    bad = drawn(0) | {"key_lengths": np.array([9])}
    mask = np.ones((5, 5), np.bool_)
    two = np.full((5, 5), 2, np.uint8).view(np.bool_)
    for _ in range(3):
        assert infer(server, good).status_code == 200
        assert infer(server, bad).status_code == 400
        assert infer(server, drawn(0) | {"mask": mask}).status_code == 200
        assert infer(server, drawn(0) | {"mask": two}).status_code == 400


def test_an_unloaded_model_is_not_there_whatever_came_before(serve: Callable[..., Server]) -> None:
    server = serve()
    assert infer(server, drawn(0)).status_code == 200
    assert server.http.post("/v2/repository/models/softmax/unload", json={}).status_code == 200
    assert infer(server, drawn(0)).status_code == 404


def test_other_variants_and_versions_have_heads_of_their_own(server: Server) -> None:
    arrays = drawn(0)
    with Client(server.url) as client:
        for name in ("softmax", "linear", "taylor", "efficient"):
            native = client.attend(name, **arrays, weights="none").output.tobytes()
            for path in (f"/v2/models/{name}/infer", f"/v2/models/{name}/versions/1/infer"):
                assert all(output(infer(server, arrays, path)) == native for _ in range(2))


def test_nothing_of_a_body_is_kept_and_few_heads_are() -> None:
    prepared: JobCache[int] = JobCache()

    def body_of(seed: int, length: int) -> tuple[memoryview, Job]:
        body, headers = written(drawn(seed, (1, 1, length, 2)))
        view = memoryview(bytearray(body))
        message = open_inference.decode(view, "inputs", int(headers[open_inference.LENGTH_HEADER]))
        return view, Job.from_message("softmax", Message({}, message.tensors), LIMITS)

    for length in range(1, 400):
        view, job = body_of(0, length)
        prepared.keep(length, view, length, job)
    assert prepared.again(1, view) is None  # long forgotten
    again, _ = body_of(7, 399)
    found = prepared.again(399, again)
    assert found is not None
    asked, job = found
    assert asked == 399
    assert bytes(job.inputs.tensors["key"].data) == drawn(7, (1, 1, 399, 2))["key"].tobytes()
    del _, view, job, found, again
    gc.collect()
    held = [o for o in gc.get_objects() if type(o) is RawTensor and o.shape == (1, 1, 399, 2)]
    assert not held


# ---------------------------------------------------------------- on the loop itself


def with_engine(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = Engine(CPU)
        engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_small_job_has_the_same_bits_there_as_in_the_devices_thread(dtype: str) -> None:
    async def test(engine: Engine) -> None:
        random = np.random.default_rng(0)
        for name in ("softmax", "linear", "taylor", "efficient", "linformer"):
            for _ in range(25):
                H, L, D = (int(random.choice([1, 2, 3, 5, 7, 16, 33, 64, 65])) for _ in range(3))
                arrays = {n: random.normal(size=(1, H, L, D)).astype(DTYPES[dtype]) for n in NAMES}
                job = job_of(arrays, name, outputs=["output", "weights"])
                if not job.is_small:
                    continue
                wait_until(lambda: not engine._running)
                now = engine.run_inline(job)
                assert isinstance(now, JobResult)
                assert bits(now) == bits(await engine.submit(job))

    with_engine(test)


def test_what_is_large_or_would_go_before_others_is_queued() -> None:
    async def test(engine: Engine) -> None:
        small, large = job_of(drawn(0)), job_of(drawn(0, (1, 8, 1024, 64)))
        assert large.flops > small.flops
        assert engine.run_inline(large) is None
        loop = job_of({"value": drawn(0, (1, 1, 30000, 1))["value"]}, "mean",
                      parameters={"method": "loop"})  # fmt: skip
        assert not loop.is_small
        long = {name: np.ones((2000, 1), np.float32) for name in NAMES}
        for name in ("linear", "taylor", "efficient", "linformer"):  # numbers may make it quadratic
            assert not job_of(long, name).is_small
        with hold(engine):
            assert engine.run_inline(small) is None
            first = engine.submit(large)
        assert engine.run_inline(small) is None  # the large one runs, or waits
        await first
        wait_until(lambda: not engine._running)
        assert engine.run_inline(small) is not None

    with_engine(test)


def test_one_that_fails_there_is_told_so_and_the_next_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: Engine) -> None:
        job = job_of(drawn(0))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "execute", lambda *_: 1 / 0)
            with pytest.raises(Internal):
                engine.run_inline(job)
        assert engine.run_inline(job) is not None
        await engine.stop()
        with pytest.raises(ServiceUnavailable):
            engine.run_inline(job)

    with_engine(test)


# ---------------------------------------------------------------- threads


@pytest.mark.slow
def test_more_threads_change_no_bits_where_they_are_taken() -> None:
    before = torch.get_num_threads()
    taken = 0
    try:
        for seed, (H, L, S, D) in enumerate([
            (8, 1024, 1024, 64), (2, 2000, 1333, 65), (1, 3000, 3000, 33), (8, 64, 9000, 64),
            (1, 1, 400_000, 64), (8, 512, 2048, 128),
        ]):  # fmt: skip
            random = np.random.default_rng(seed)
            arrays = {
                n: random.normal(size=(1, H, size, D)).astype(np.float32)
                for n, size in zip(NAMES, (L, S, S), strict=True)
            }
            for fields in ({}, {"parameters": {"causal": True}}, {"outputs": ["output", "scores"]}):
                if "outputs" in fields and L * S * H > 1 << 24:
                    continue
                job = job_of(arrays, **fields)
                (alone,) = execute([job], CPU, False, 1, 1)
                (spread,) = execute([job], CPU, False, 1, 4)
                taken += torch.get_num_threads() == 4
                assert {n: bytes(t.data) for n, t in alone.outputs.items()} == {
                    n: bytes(t.data) for n, t in spread.outputs.items()
                }
    finally:
        torch.set_num_threads(before)
    assert taken >= 5  # and it was tried at all


def test_numbers_that_take_another_path_take_it_on_their_own_threads() -> None:
    arrays = drawn(0, (1, 4, 1024, 64))
    arrays["query"][0, 0, 0, 0] = 3e38
    job = job_of(arrays)
    before = torch.get_num_threads()
    try:
        (alone,) = execute([job], CPU, False, 1, 1)
        (spread,) = execute([job], CPU, False, 1, 4)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert alone.backend == spread.backend == "explicit"
    assert bytes(alone.outputs["output"].data) == bytes(spread.outputs["output"].data)


def test_only_kernels_of_torchs_own_are_spread() -> None:
    arrays = drawn(0, (1, 8, 1024, 64))
    assert job_of(arrays).uses_sdpa
    assert not job_of(arrays, parameters={"dropout": 0.5}).uses_sdpa
    assert not job_of(arrays, parameters={"softcap": 5.0}).uses_sdpa
    assert not job_of(arrays, outputs=["output", "weights"]).uses_sdpa
    assert not job_of(drawn(0, (1, 8, 32, 64))).uses_sdpa
    others = [v.name for v in variants().values() if v.name not in ("softmax", "mean")]
    assert not any(job_of(arrays, n).uses_sdpa for n in others if n != "linear_layer")
