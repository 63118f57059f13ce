"""POST /v1/convert: converts a layer's weights to another layout."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import JobRunner
from qkv.api.request_body import TensorResponse, read_message
from qkv.jobs.convert import convert_message
from qkv.settings import Settings

__all__ = ["router"]


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["layers"])

    @routes.post(
        "/v1/convert",
        operation_id="convert",
        summary="Converts a layer's weights to another layout, and verifies the result.",
        description="No number changes. Layout v1 has `W_query`, `W_key` and `W_value` of shape "
        "(in, out), applied as `x @ W`. Layout v2 is that of `nn.Linear`: `W_query.weight` of "
        "shape (out, in) and optionally `W_query.bias`.",
    )
    async def convert_weights(request: Request) -> Response:
        with job_runner.admit(request) as admission:
            received = await read_message(
                request, "tensors", settings.max_body_bytes, admission.grow
            )
            # the converted tensors
            admission.grow(sum(tensor.nbytes for tensor in received.message.tensors.values()))
            codec = received.response_codec
            chunks = await asyncio.to_thread(
                lambda: codec.encode(convert_message(received.message), "tensors")
            )
        return TensorResponse(chunks, codec.MEDIA_TYPE)

    return routes
