"""POST /v1/gradients/{variant}: what a variant's inputs, and its layer, do to its output."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run import Native
from qkv.attention import catalogue
from qkv.jobs.gradient_job import GradientJob
from qkv.wire.message import Message

__all__ = ["router"]


def router(native: Native) -> APIRouter:
    """The routes, one per variant that has gradients."""
    routes = APIRouter(tags=["gradients"])
    for variant in catalogue.variants().values():
        if variant.backward is not None:
            routes.add_api_route(
                f"/v1/gradients/{variant.name}",
                native.endpoint(GradientJob, variant.name, "gradients"),
                methods=["POST"],
                operation_id=f"gradients_{variant.name}",
                summary=f"The gradients of {variant.name}.",
                description="Of sum(grad_output * output), with respect to each floating input "
                "and each tensor of the layer.",
            )

    @routes.post("/v1/gradients/{variant}", include_in_schema=False)
    async def unknown(request: Request) -> Response:
        GradientJob.of(request.path_params["variant"], Message(), native.runs.limits)  # raises
        raise AssertionError

    return routes
