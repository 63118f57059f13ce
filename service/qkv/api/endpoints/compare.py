"""POST /v1/compare: compares variants on the same inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import SERVER_TIMING, JobRunner, cancel_on_disconnect
from qkv.api.request_body import in_thread_if_large, read_message
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import CompareReport, TimedOutputs, compare
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.settings import Settings
from qkv.wire import json, require_acceptable
from qkv.wire.responses import CompareResponse, CompareTiming

__all__ = ["router"]

_PARTS = ("queue_ms", "transfer_ms", "compute_ms")


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
        report, timing = await cancel_on_disconnect(request, asyncio.ensure_future(pending))
        timing["total_ms"] = (time.perf_counter() - received.received_at) * 1e3
        found = CompareResponse(*report, CompareTiming(**timing))
        content = await in_thread_if_large(comparison.head_bytes, partial(json.dump, found))
        return Response(
            content,
            media_type=json.MEDIA_TYPE,
            headers={"Server-Timing": SERVER_TIMING % timing},
        )

    return routes


async def _run_comparison(
    job_runner: JobRunner, comparison: CompareRequest, wait_s: float | None
) -> tuple[CompareReport, dict[str, Any]]:
    """Returns the report, and the timing of all its jobs."""
    steps = compare(comparison)
    # of the tensors and figures in a step between two jobs
    size = comparison.baseline.plan.bytes_in + comparison.head_bytes
    timing: dict[str, Any] = dict.fromkeys(_PARTS, 0.0) | {"runs": 0}
    measurement: TimedOutputs | None = None
    while True:
        job = await in_thread_if_large(size, partial(_step, steps, measurement))
        if isinstance(job, CompareReport):
            return job, timing
        job_result = await job_runner.run_part(job, wait_s)
        for part in _PARTS:
            timing[part] += job_result.timing[part]
        timing["runs"] += 1
        timing["device"] = job_result.timing["device"]
        measurement = job_result.outputs, job_result.timing["compute_ms"]


def _step(
    steps: Generator[Job, TimedOutputs, CompareReport], measurement: TimedOutputs | None
) -> Job | CompareReport:
    """Returns the next job, or the report: a thread cannot raise StopIteration."""
    try:
        return next(steps) if measurement is None else steps.send(measurement)
    except StopIteration as end:
        report: CompareReport = end.value
        return report
