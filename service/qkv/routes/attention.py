"""POST /v1/attention/{variant}: runs a variant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from qkv import catalogue
from qkv.engine import Answer, Engine
from qkv.errors import Left
from qkv.job import Job, Limits
from qkv.message import Message
from qkv.routes.body import Outgoing, elsewhere, read
from qkv.settings import Settings

__all__ = ["router"]

_STAGES = ("queue", "transfer", "compute", "total")


def router(engine: Engine, settings: Settings) -> APIRouter:
    """The routes, one per variant, so that each has its own schema."""
    routes = APIRouter(tags=["attention"])
    limits = Limits(
        answer=settings.max_answer_bytes,
        request=settings.max_queue_bytes,
        scores=settings.max_scores,
    )

    def endpoint(variant: str) -> Callable[[Request], Awaitable[Response]]:
        async def attend(request: Request) -> Response:
            received = await read(request, "inputs", settings.max_body_bytes)
            size = sum(t.nbytes for t in received.message.tensors.values())
            job = await elsewhere(size, lambda: Job.of(variant, received.message, limits))
            answer = await _answered(request, engine.submit(job))
            timing = _with_total(answer.timing, received.at)
            message = Message(
                {"variant": variant, "outputs": None, "timing": timing},
                answer.outputs,
                encoding=received.message.encoding or "base64",
            )
            return await elsewhere(
                job.bytes_out,
                lambda: Outgoing(received.answer_in, message, "outputs", _server_timing(timing)),
            )

        return attend

    for variant in catalogue.variants().values():
        routes.add_api_route(
            f"/v1/attention/{variant.name}",
            endpoint(variant.name),
            methods=["POST"],
            operation_id=f"attend_{variant.name}",
            summary=variant.summary,
            description=f"`{variant.module.FORMULA}`\n\nPaper: {variant.module.PAPER}.\n\n"
            f"Cost: {variant.module.COST}.",
        )

    @routes.post("/v1/attention/{variant}", include_in_schema=False)
    async def unknown(request: Request) -> Response:
        catalogue.find(request.path_params["variant"])  # raises: those there are come above
        raise AssertionError

    return routes


async def _answered(request: Request, future: asyncio.Future[Answer]) -> Answer:
    """The future's result; a caller that leaves meanwhile gives its place in the queue back."""
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise Left("the caller left before its turn came")
        return await future
    finally:
        leaving.cancel()
        future.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _with_total(timing: dict[str, Any], received: float) -> dict[str, Any]:
    """The timing with `total_ms`, from the body's last byte to here, in its place."""
    stages = {f"{stage}_ms": timing.get(f"{stage}_ms", 0.0) for stage in _STAGES}
    stages["total_ms"] = (time.perf_counter() - received) * 1e3
    return stages | {name: value for name, value in timing.items() if name not in stages}


def _server_timing(timing: dict[str, Any]) -> dict[str, str]:
    """Server-Timing, as W3C's Server Timing defines it: milliseconds."""
    stages = (f"{stage};dur={timing[f'{stage}_ms']:.4f}" for stage in _STAGES)
    return {"Server-Timing": ", ".join(stages)}
