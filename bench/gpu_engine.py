"""Measures an engine on an accelerator: requests per second beside bare torch, out of memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from bodies import SHAPES
from gpu_jobs import UNLIMITED, build_jobs
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.engine import GPU_MAX_BATCH, Engine
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor
from qkv.wire.message import Message

IN_FLIGHT: Final = 4 * GPU_MAX_BATCH
"""Requests at the same time: while one batch runs, others wait in the queue."""
WARM_UP_S: Final = 0.3

CALLS: Final = 32  # bare calls between two waits
_UNLIMITED: Final = Load(1 << 20, 1 << 62, 1 << 62)

T = TypeVar("T")


class RateResult(NamedTuple):
    """Requests per second of one size and dtype, one number for each try.

    Attributes:
        shape: key of `SHAPES`.
        dtype: of the inputs.
        engine: of an engine with many requests at the same time.
        batch_size: mean size of its batches.
        bare: of torch's own attention, one request for each call.
        bare_stacked: of the same, with as many requests in a call as a batch may have.
    """

    shape: str
    dtype: str
    engine: list[float]
    batch_size: float
    bare: list[float]
    bare_stacked: list[float]


class MemoryResult(NamedTuple):
    """A request that is larger than the memory of the device, among others.

    Attributes:
        needed_bytes: that its outputs need.
        total_bytes: of the device.
        error: name of the class of the error that its client gets; empty: none.
        others: requests that were queued behind it.
        right: those of them with a right output.
    """

    needed_bytes: int
    total_bytes: int
    error: str
    others: int
    right: int


def measure_rates(
    device: Accelerator, shape: str, dtype: str, seconds: float, tries: int
) -> RateResult:
    """Measures requests per second of softmax, in turns of `seconds` seconds each."""
    jobs = build_jobs("softmax", GPU_MAX_BATCH, SHAPES[shape], dtype)
    one, many = (_on_device(jobs[:n], device) for n in (1, GPU_MAX_BATCH))
    engine_rates: list[float] = []
    bare: list[float] = []
    bare_stacked: list[float] = []

    async def measure(engine: Engine) -> float:
        results = await asyncio.gather(*map(engine.submit, jobs))
        assert all(map(_is_right, jobs, results)), f"outputs of {shape}, {dtype} are wrong"
        await _engine_rate(engine, jobs, WARM_UP_S)
        sizes: list[float] = []
        for _ in range(tries):
            rate, batch_size = await _engine_rate(engine, jobs, seconds)
            engine_rates.append(rate)
            sizes.append(batch_size)
            bare.append(_bare_rate(one, device, seconds))
            bare_stacked.append(GPU_MAX_BATCH * _bare_rate(many, device, seconds))
        return sum(sizes) / len(sizes)

    batch_size = _with_engine(device, measure)
    return RateResult(shape, dtype, engine_rates, batch_size, bare, bare_stacked)


def _with_engine(device: Accelerator, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Runs `work` with a new engine."""

    async def main() -> T:
        engine = Engine(device, max_batch=GPU_MAX_BATCH, limit=_UNLIMITED)
        engine.start()
        try:
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


async def _engine_rate(engine: Engine, jobs: Sequence[Job], seconds: float) -> tuple[float, float]:
    """Returns requests per second and the mean size of a batch.

    Each of `IN_FLIGHT` clients submits its next request when it has the result of the last one.
    """
    turn, batch_sizes = cycle(jobs), list[int]()
    started_at = time.perf_counter()
    end = started_at + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            job = next(turn)
            result = await engine.submit(Job(job.plan, job.tensors))
            batch_sizes.append(result.batch_size)

    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    count, elapsed_s = len(batch_sizes), time.perf_counter() - started_at
    # a batch of n requests occurs n times
    return count / elapsed_s, count / sum([1 / size for size in batch_sizes])


def _on_device(jobs: Sequence[Job], device: Accelerator) -> list[Tensor]:
    """Returns query, key and value of jobs on the device, stacked along B."""
    tensors = []
    for name in ("query", "key", "value"):
        parts = [torch.from_numpy(np.array(job.tensors[name].numpy())) for job in jobs]
        tensors.append(torch.cat(parts).to(device.torch_device))
    return tensors


def _bare_rate(tensors: Sequence[Tensor], device: Accelerator, seconds: float) -> float:
    """Returns calls per second of torch's own attention, on tensors that are there already."""
    with torch.inference_mode():
        _call_bare(tensors, device)  # warm-up
        calls, started_at = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_at) < seconds:
            _call_bare(tensors, device)
            calls += CALLS
    return calls / elapsed_s


def _call_bare(tensors: Sequence[Tensor], device: Accelerator) -> None:
    """Calls torch's own attention several times, then waits for the device."""
    query, key, value = tensors
    for _ in range(CALLS):
        scaled_dot_product_attention(query, key, value)
    event = device.new_event()
    event.record(device.current_stream())
    event.synchronize()


def _is_right(job: Job, result: Result) -> bool:
    """Returns True if the output equals the reference, up to the roundings of its dtype."""
    inputs = [
        torch.from_numpy(job.tensors[name].numpy().astype(np.float64))
        for name in ("query", "key", "value")
    ]
    variant = job.plan.variant
    arguments = [i.argument for i in variant.inputs.values()]
    named = dict(zip(arguments, inputs, strict=False))
    expected = variant.reference(**named).output.numpy()
    found = result.outputs["output"].numpy().astype(np.float64)
    *_, S, D = inputs[2].shape
    # the sums are in float32; weights and outputs are rounded to the dtype
    roundings = (8 + 2 * D + S) * torch.finfo(torch.float32).eps
    roundings += 4 * torch.finfo(getattr(torch, job.plan.inputs.dtype)).eps
    return bool(np.abs(found - expected).max() <= roundings * float(inputs[2].abs().max()))


def too_large(total_bytes: int) -> Job:
    """Returns a job whose weights need four times as many bytes as the device has."""
    length = 2 * int((total_bytes / 4) ** 0.5)
    tensor = RawTensor.from_numpy(np.ones((1, 1, length, 1), np.float32))
    message = Message({"outputs": ["weights"]}, dict.fromkeys(("query", "key", "value"), tensor))
    return Job.new(Plan, "softmax", message, UNLIMITED)


def measure_out_of_memory(
    device: Accelerator, count: int = 8, before: Callable[[], object] = lambda: None
) -> MemoryResult:
    """Runs a request that is larger than the device's memory, and others behind it.

    Args:
        device: runs them.
        count: the number of the others.
        before: called before they are submitted.
    """
    _, total_bytes = device.free_memory()
    large, others = too_large(total_bytes), build_jobs("softmax", count)

    async def run(engine: Engine) -> list[Any]:
        before()
        futures = [engine.submit(job) for job in (large, *others)]
        return list(await asyncio.gather(*futures, return_exceptions=True))

    logging.disable(logging.ERROR)  # the engine logs the error
    try:
        first, *results = _with_engine(device, run)
    finally:
        logging.disable(logging.NOTSET)
    error = type(first).__name__ if isinstance(first, BaseException) else ""
    right = sum(
        isinstance(result, Result) and _is_right(job, result)
        for job, result in zip(others, results, strict=True)
    )
    return MemoryResult(large.plan.bytes_out, total_bytes, error, count, right)
