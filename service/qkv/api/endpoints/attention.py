"""POST /v1/attention/{variant}: runs a variant."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run import Native
from qkv.attention import catalogue
from qkv.jobs.job import Job

__all__ = ["router"]


def router(native: Native) -> APIRouter:
    """The routes, one per variant, so that each has its own schema."""
    routes = APIRouter(tags=["attention"])
    for variant in catalogue.variants().values():
        routes.add_api_route(
            f"/v1/attention/{variant.name}",
            native.endpoint(Job, variant.name, "outputs"),
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
