"""POST /v1/convert: weights of one layout into another."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Request, Response

from qkv.job import invalid_field
from qkv.layers.conversion import convert
from qkv.literals import typed
from qkv.message import Message
from qkv.routes import schemas
from qkv.routes.body import read
from qkv.settings import Settings
from qkv.tensors import FLOATING, RawTensor
from qkv.wire import json

__all__ = ["router"]


class _Conversion(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    source: Annotated[str, pydantic.Field(alias="from")]
    target: Annotated[str, pydantic.Field(alias="to")]
    heads: Annotated[int, pydantic.Field(ge=1, le=65536)] | None = None
    bias: Literal["refuse", "augment"] = "refuse"
    dtype: Literal["float64", "float32", "float16", "bfloat16"] = "float32"


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
        message = (await read(request, "tensors", settings.max_body_bytes)).message
        body = await asyncio.to_thread(_convert, message)
        return Response(body, media_type=json.MEDIA_TYPE)

    return routes


def _convert(message: Message) -> bytes:
    try:
        asked = _Conversion.model_validate(message.fields)
    except pydantic.ValidationError as error:
        known = ["from", "to", "tensors", "heads", "bias", "dtype", "encoding"]
        raise invalid_field(error, known) from None
    tensors = {
        name: typed(raw, name, FLOATING, asked.dtype, f"/tensors/{name}").numpy()
        for name, raw in message.tensors.items()
    }
    done = convert(asked.source, asked.target, tensors, heads=asked.heads, bias=asked.bias)
    fields = {"from": asked.source, "to": asked.target, "tensors": None, "check": done.check}
    raw = {name: RawTensor.from_numpy(array) for name, array in done.tensors.items()}
    return json.encode(Message(fields, raw, encoding=message.encoding), "tensors")
