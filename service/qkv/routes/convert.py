"""POST /v1/convert: weights of one layout into another."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qkv.conversion import convert_message
from qkv.routes.body import Outgoing, read
from qkv.settings import Settings

__all__ = ["router"]


def router(settings: Settings) -> APIRouter:
    """The route."""
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
        received = await read(request, "tensors", settings.max_body_bytes)
        message = await asyncio.to_thread(convert_message, received.message)
        codec = received.answer_in
        return Outgoing(codec.encode(message, "tensors"), codec.MEDIA_TYPE)

    return routes
