"""POST /v1/convert: weights of one layout into another."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qkv.conversion import convert_message
from qkv.routes import schemas
from qkv.routes.body import Outgoing, read
from qkv.settings import Settings

__all__ = ["router"]


def router(settings: Settings) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["layers"])

    @routes.post(
        "/v1/convert",
        summary="Takes a layer's weights from one layout to another, and checks it.",
        openapi_extra=schemas.convert_request(),
        responses=schemas.convert_responses(),
    )
    async def convert_weights(request: Request) -> Response:
        received = await read(request, "tensors", settings.max_body_bytes)
        message = await asyncio.to_thread(convert_message, received.message)
        return Outgoing(received.answer_in, message, "tensors")

    return routes
