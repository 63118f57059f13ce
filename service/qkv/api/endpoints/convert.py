"""POST /v1/convert: converts a layer's weights to another layout, or detects their layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import JobRunner
from qkv.api.request_body import TensorResponse, read_message
from qkv.api.work_threads import WorkThreads
from qkv.jobs.convert import convert_message, working_bytes
from qkv.settings import Settings

__all__ = ["router"]

_THREADS: Final = 2


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["layers"])
    threads = WorkThreads("convert", _THREADS)

    @routes.post(
        "/v1/convert",
        operation_id="convert",
        summary="Converts a layer's weights to another layout, and verifies the result.",
        description="No number changes. Layout v1 has `W_query`, `W_key` and `W_value` of shape "
        "(in, out), applied as `x @ W`. Layout v2 is that of `nn.Linear`: `W_query.weight` of "
        "shape (out, in) and optionally `W_query.bias`. With `check`, the service finds layout, "
        "heads, rotary order and scale by running: it compares candidates with the output of the "
        "real module.",
    )
    async def convert_weights(request: Request) -> Response:
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(
                request, "tensors", settings.max_body_bytes, admission.grow
            )
            admission.is_received = True
            admission.grow(working_bytes(received.message))
            codec = received.response_codec

            def work(raise_if_stopped: Callable[[], None]) -> list[bytes | memoryview]:
                converted = convert_message(received.message, raise_if_stopped)
                raise_if_stopped()
                return codec.encode(converted, "tensors")

            chunks = await threads.run(request, received.received_at, wait_s, work)
        return TensorResponse(chunks, codec.MEDIA_TYPE)

    return routes
