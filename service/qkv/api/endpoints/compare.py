"""POST /v1/compare: compares variants on the same inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run_schemas import LAYER, input_schemas, parameters
from qkv.api.job_runner import JobRunner, cancel_on_disconnect
from qkv.api.observability import record_times
from qkv.api.openapi.operation import (
    SERVER_TIMING,
    TIMEOUT,
    describe,
    in_both_formats,
    in_json,
    problem_responses,
)
from qkv.api.openapi.response_schemas import response_schema
from qkv.api.openapi.schemas import (
    ENCODING,
    TENSOR,
    Schema,
    closed,
    either,
    enumeration,
    model_fields,
    named,
    nullable,
    pascal,
)
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_message
from qkv.api.run_timing import server_timing
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.errors import NotAcceptable, NotFound, QkvError
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_report import CompareReport, TimedOutputs, compare
from qkv.jobs.measure.compare_request import CompareFields, CompareRequest
from qkv.settings import Settings
from qkv.telemetry.times import Times
from qkv.wire import json, require_acceptable
from qkv.wire.responses import CompareResponse, CompareTiming

__all__ = ["CHOICE", "choice_of", "router", "specific_errors"]

CHOICE: Final = "a variant's name, or an object of `variant` and `parameters`"


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
        openapi_extra=_describe(),
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
        response = CompareResponse(*report, timing)
        content = await in_thread_if_large(comparison.head_bytes, partial(json.dump, response))
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
        measurement = result.outputs, result.times.compute_s * 1e3, result.notes


def _step(
    steps: Generator[Job, TimedOutputs, CompareReport], measurement: TimedOutputs | None
) -> Job | CompareReport:
    """Returns the next job, or the report: a thread cannot raise StopIteration."""
    try:
        return next(steps) if measurement is None else steps.send(measurement)
    except StopIteration as end:
        report: CompareReport = end.value
        return report


def _describe() -> dict[str, Any]:
    """Returns the description of the operation."""
    file = "The inputs by name; all other fields as JSON under `qkv` in the metadata."
    text = f"Tensors, and variants to compare on them: {CHOICE} each."
    good = in_json("Measurements of each variant, and notes.", response_schema(CompareResponse))
    errors = problem_responses(
        400, 413, 415, 422, 429, 500, 503, 504, extra=specific_errors(json.MEDIA_TYPE)
    )
    responses = {"200": good | {"headers": SERVER_TIMING}} | errors
    return describe(responses, in_both_formats(text, _request(), file), [TIMEOUT])


def _request() -> Schema:
    """Returns the schema of a body."""
    fields = model_fields(CompareFields)
    every = list(catalogue.variants().values())
    choice = choice_of("VariantChoice", every)
    tensors: Schema = {"x": TENSOR | {"description": "(B, L, M) or (L, M), with a layer"}}
    for variant in sorted(every, key=lambda variant: "mask" not in variant.inputs):
        tensors = input_schemas(variant) | tensors
    unused = {"description": "Has no effect: the response has no tensors."}
    fields |= {
        "inputs": named("CompareInputs", closed(tensors, ()) | {"minProperties": 1}),
        "variants": fields["variants"] | {"items": choice},
        "anchor": choice | {"description": fields["anchor"]["description"]},
        "layer": nullable(LAYER),
        "encoding": ENCODING | unused,
    }
    return named("CompareRequest", closed(fields, ["inputs", "variants"]))


def choice_of(name: str, variants: Iterable[Variant]) -> Schema:
    """Returns the component of a variant's name, or of a variant with its parameters."""
    known = list(variants)
    objects = [
        named(
            f"{pascal(v.name)}Choice",
            closed({"variant": {"const": v.name}, "parameters": parameters(v)}, ["variant"]),
        )
        for v in known
    ]
    names = enumeration(f"{name}Name", [v.name for v in known])
    return named(name, either(names, *objects))


def specific_errors(*media_types: str) -> list[QkvError]:
    """Returns the errors of a measurement with details of their own."""
    return [
        NotFound("no variant 'sotfmax'; /v1/variants lists all", pointer="/anchor"),
        NotAcceptable(
            f"Accept excludes every format: got 'text/html', expected {' or '.join(media_types)}"
        ),
    ]
