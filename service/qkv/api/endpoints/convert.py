"""POST /v1/convert: weights of one layout into another."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qkv.api.job_runner import Runs
from qkv.api.request_body import Outgoing, read
from qkv.jobs.convert import convert_message
from qkv.settings import Settings

__all__ = ["router"]


def router(runs: Runs, settings: Settings) -> APIRouter:
    """The route; `runs` says whether there is room."""
    routes = APIRouter(tags=["layers"])

    @routes.post(
        "/v1/convert",
        operation_id="convert",
        summary="Takes a layer's weights from one layout to another, and checks it.",
        description="No number changes. Layout v1 keeps `W_query`, `W_key` and `W_value` as "
        "(in, out), applied as `x @ W`; v2 as `nn.Linear` does, `W_query.weight` (out, in) and "
        "maybe `W_query.bias`.",
    )
    async def convert_weights(request: Request) -> Response:
        with runs.enter(request) as place:
            received = await read(request, "tensors", settings.max_body_bytes, place.grow)
            place.grow(sum(tensor.nbytes for tensor in received.message.tensors.values()))  # again
            codec = received.answer_in
            chunks = await asyncio.to_thread(
                lambda: codec.encode(convert_message(received.message), "tensors")
            )
        return Outgoing(chunks, codec.MEDIA_TYPE)

    return routes
