"""POST /v1/compare: compares variants on the same inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from functools import partial

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import JobRunner, cancel_on_disconnect
from qkv.api.observability import record_times
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_message
from qkv.api.run_timing import server_timing
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import CompareReport, TimedOutputs, compare
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.settings import Settings
from qkv.telemetry.times import Times
from qkv.wire import json, require_acceptable
from qkv.wire.responses import CompareResponse, CompareTiming

__all__ = ["router"]


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["attention"])

    @routes.post(
        "/v1/compare",
        operation_id="compare",
        summary="Compares variants with a baseline on the same inputs.",
        description="Output errors are those of the outputs in their dtype, accumulated in "
        "float64. Weights are compared row by row in float64. All logarithms are natural. Each run "
        "is queued by itself, so that other requests run in between. With `per_head` each figure "
        "of outputs and weights is also that of each query head.",
    )
    async def compare_variants(request: Request) -> Response:
        require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(
                request, "inputs", settings.max_body_bytes, admission.grow
            )
            message = received.message
            tensors = (*message.tensors.values(), *message.layer.values())
            size = sum(tensor.nbytes for tensor in tensors if tensor.is_untyped)
            comparison = await in_thread_if_large(
                size, lambda: CompareRequest(message, job_runner.limits)
            )
        pending = _run_comparison(job_runner, comparison, wait_s)
        report, times, runs, device = await cancel_on_disconnect(
            request, asyncio.ensure_future(pending)
        )
        times.total_s = time.perf_counter() - received.received_at
        record_times(times)
        timing = CompareTiming(
            queue_ms=times.queue_s * 1e3,
            transfer_ms=times.transfer_s * 1e3,
            compute_ms=times.compute_s * 1e3,
            runs=runs,
            device=device,
            total_ms=times.total_s * 1e3,
        )
        found = CompareResponse(*report, timing)
        content = await in_thread_if_large(comparison.head_bytes, partial(json.dump, found))
        return TensorResponse([content], json.MEDIA_TYPE, [server_timing(times)])

    return routes


async def _run_comparison(
    job_runner: JobRunner, comparison: CompareRequest, wait_s: float | None
) -> tuple[CompareReport, Times, int, str]:
    """Returns the report, the sums of the times of its jobs, their number, and the device."""
    steps = compare(comparison)
    # of the tensors and figures in a step between two jobs
    size = comparison.baseline.plan.bytes_in + comparison.head_bytes
    times, runs, device = Times(), 0, ""
    measurement: TimedOutputs | None = None
    while True:
        job = await in_thread_if_large(size, partial(_step, steps, measurement))
        if isinstance(job, CompareReport):
            return job, times, runs, device
        result = await job_runner.run_part(job, wait_s)
        times.add(result.times)
        runs, device = runs + 1, result.device
        measurement = result.outputs, result.times.compute_s * 1e3


def _step(
    steps: Generator[Job, TimedOutputs, CompareReport], measurement: TimedOutputs | None
) -> Job | CompareReport:
    """Returns the next job, or the report: a thread cannot raise StopIteration."""
    try:
        return next(steps) if measurement is None else steps.send(measurement)
    except StopIteration as end:
        report: CompareReport = end.value
        return report
