"""POST /v1/attention/{variant} and /v1/gradients/{variant}: runs a variant, or its gradients.

`RunHandler.handle` handles both, in every wire format.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.endpoints.run_schemas import describe_gradients, describe_run
from qkv.api.job_runner import JobRunner
from qkv.api.request_body import TensorResponse, in_thread_if_large, read_message
from qkv.api.run_timing import server_timing, timing_fields
from qkv.attention import catalogue
from qkv.jobs.annotations import annotate
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.plan import Plan
from qkv.settings import Settings
from qkv.wire import json
from qkv.wire.message import Message

__all__ = ["RunHandler", "attention_router", "gradients_router"]

_RELATIVE_COST: Final = {"base64": 0.1}  # cost of encoding a byte, relative to numbers in lists


class RunHandler:
    """The handler of requests to run a variant.

    Args:
        job_runner: runs the jobs.
        settings: limits of a body.
    """

    def __init__(self, job_runner: JobRunner, settings: Settings) -> None:
        self.job_runner = job_runner
        self._max_body_bytes = settings.max_body_bytes

    def endpoint(
        self, kind: type[Plan], variant: str, group: str
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns the endpoint of one variant; arguments as for `handle`."""

        async def endpoint(request: Request) -> Response:
            return await self.handle(request, kind, variant, group)

        return endpoint

    async def handle(
        self, request: Request, kind: type[Plan], variant: str, group: str
    ) -> Response:
        """Runs one request.

        Args:
            request: the request.
            kind: the class of the plan; `Plan` is a forward pass.
            variant: the variant's name.
            group: the field of the response with the tensors.

        Raises:
            QkvError: the request is invalid, or could not be run.
        """
        with self.job_runner.admit(request) as admission:
            received = await read_message(request, "inputs", self._max_body_bytes, admission.grow)
            job = await self.job_runner.new_job(variant, received.message, kind)
        result = await self.job_runner.run(request, received.received_at, job)
        codec, encoding = received.response_codec, received.message.encoding or "base64"
        timing, known = timing_fields(result, job.plan), annotate(job.plan, result.notes)
        fields = {"variant": variant, group: None, **known, "timing": timing}
        message = Message(fields, result.outputs, encoding=encoding)
        size = result.nbytes * _RELATIVE_COST.get(encoding, 1.0) if codec is json else 0
        chunks = await in_thread_if_large(int(size), lambda: codec.encode(message, group))
        return TensorResponse(chunks, codec.MEDIA_TYPE, [server_timing(result.times)])


def attention_router(handler: RunHandler) -> APIRouter:
    """Returns the routes of runs: one for each variant, with a schema of its own."""
    routes = APIRouter(tags=["attention"])
    for variant in catalogue.variants().values():
        routes.add_api_route(
            f"/v1/attention/{variant.name}",
            handler.endpoint(Plan, variant.name, "outputs"),
            methods=["POST"],
            operation_id=f"attend_{variant.name}",
            summary=variant.summary,
            description=f"`{variant.formula}`\n\nPaper: {variant.paper}.\n\nCost: {variant.cost}.",
            openapi_extra=describe_run(variant),
        )

    @routes.post("/v1/attention/{variant}", include_in_schema=False)
    async def unknown(request: Request) -> Response:
        catalogue.find(request.path_params["variant"])  # raises: known variants have routes above
        raise AssertionError

    return routes


def gradients_router(handler: RunHandler) -> APIRouter:
    """Returns the routes of gradients, one for each variant that has them."""
    routes = APIRouter(tags=["gradients"])
    for variant in catalogue.variants().values():
        if variant.backward is not None:
            routes.add_api_route(
                f"/v1/gradients/{variant.name}",
                handler.endpoint(GradientPlan, variant.name, "gradients"),
                methods=["POST"],
                operation_id=f"gradients_{variant.name}",
                summary=f"The gradients of {variant.name}.",
                description="Gradients of sum(grad_output * output) with respect to each floating "
                "input and each tensor of the layer.",
                openapi_extra=describe_gradients(variant),
            )

    @routes.post("/v1/gradients/{variant}", include_in_schema=False)
    async def unknown(request: Request) -> Response:
        variant, limits = request.path_params["variant"], handler.job_runner.limits
        GradientPlan.from_message(variant, Message(), limits)  # raises, as above
        raise AssertionError

    return routes
