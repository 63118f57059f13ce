"""POST /v1/compare: variants on one set of inputs, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import SERVER_TIMING, Runs, unless_left
from qkv.api.request_body import elsewhere, read
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import Made, compare
from qkv.jobs.measure.compare_request import Comparison
from qkv.settings import Settings
from qkv.wire import json, require

__all__ = ["router"]

_PARTS = ("queue_ms", "transfer_ms", "compute_ms")


def router(runs: Runs, settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["attention"])

    @routes.post(
        "/v1/compare",
        operation_id="compare",
        summary="Runs variants on one set of inputs, and says how far they are from one another.",
        description="Output errors are those of the outputs as they are answered, summed up in "
        "float64; weights are compared row by row in float64. All logarithms are natural. Each run "
        "waits for its turn by itself, so that others are answered in between.",
    )
    async def compare_variants(request: Request) -> Response:
        require(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
        wait_s = runs.patience_of(request)
        with runs.enter(request) as place:
            received = await read(request, "inputs", settings.max_body_bytes, place.grow)
            message = received.message
            every = (*message.tensors.values(), *message.layer.values())
            size = sum(tensor.nbytes for tensor in every if tensor.literal)
            comparison = await elsewhere(size, lambda: Comparison(message, runs.limits))
        measuring = _measured(runs, comparison, wait_s)
        body, timing = await unless_left(request, asyncio.ensure_future(measuring))
        timing["total_ms"] = (time.perf_counter() - received.at) * 1e3
        return Response(
            json.dump(body | {"timing": timing}),
            media_type=json.MEDIA_TYPE,
            headers={"Server-Timing": SERVER_TIMING % timing},
        )

    return routes


async def _measured(
    runs: Runs, comparison: Comparison, wait_s: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer, and what its runs took together."""
    steps = compare(comparison)
    size = comparison.anchor.timed.bytes_in  # of what is looked at, or made, between two jobs
    timing: dict[str, Any] = dict.fromkeys(_PARTS, 0.0) | {"runs": 0}
    made: Made | None = None
    while True:
        job = await elsewhere(size, partial(_step, steps, made))
        if isinstance(job, dict):
            return job, timing
        ran = await runs.measure(job, wait_s)
        for part in _PARTS:
            timing[part] += ran.timing[part]
        timing["runs"] += 1
        timing["device"] = ran.timing["device"]
        made = ran.outputs, ran.timing["compute_ms"]


def _step(steps: Generator[Job, Made, dict[str, Any]], made: Made | None) -> Job | dict[str, Any]:
    """The next job, or the answer: no thread may raise StopIteration."""
    try:
        return next(steps) if made is None else steps.send(made)
    except StopIteration as end:
        answer: dict[str, Any] = end.value
        return answer
