"""POST /v1/attention/{variant}: runs a variant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from qkv import catalogue
from qkv.message import Message
from qkv.routes.body import Outgoing, elsewhere, read
from qkv.routes.runs import Runs
from qkv.settings import Settings

__all__ = ["router"]


def router(runs: Runs, settings: Settings) -> APIRouter:
    """The routes, one per variant, so that each has its own schema."""
    routes = APIRouter(tags=["attention"])

    def endpoint(variant: str) -> Callable[[Request], Awaitable[Response]]:
        async def attend(request: Request) -> Response:
            received = await read(request, "inputs", settings.max_body_bytes)
            ran = await runs.run(request, received.at, variant, received.message)
            message = Message(
                {"variant": variant, "outputs": None, "timing": ran.timing},
                ran.outputs,
                encoding=received.message.encoding or "base64",
            )
            codec = received.answer_in
            chunks = await elsewhere(ran.nbytes, lambda: codec.encode(message, "outputs"))
            return Outgoing(chunks, codec.MEDIA_TYPE, ran.headers)

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
