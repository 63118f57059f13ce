"""POST /v1/attention/{variant} and /v1/gradients/{variant}: runs a variant, or its gradients.

`RunHandler.handle` handles both, in every wire format.
"""

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.bodies import DEADLINE
from qkv.api.endpoints import run_models
from qkv.api.job_runner import JobRunner
from qkv.api.openapi.operation import SERVER_TIMING, in_safetensors, problem_responses
from qkv.api.request_body import (
    ReceivedMessage,
    TensorResponse,
    in_thread_if_large,
    read_message,
)
from qkv.api.routes import run_route
from qkv.api.run_timing import server_timing, timing_fields
from qkv.attention import catalogue
from qkv.engine.admission import AdmittedBody
from qkv.jobs.annotations import annotate
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.plan import Plan
from qkv.settings import Settings
from qkv.wire import json
from qkv.wire.message import Message

_RELATIVE_COST: Final = {"base64": 0.1}  # cost of encoding a byte, relative to numbers in lists
_REQUEST_FILE: Final = (
    "The inputs by name, the tensors of a layer as `layer.<name>`; all other fields as JSON under "
    "`qkv` in the metadata."
)
_STATUSES: Final = (400, 406, 413, 415, 422, 429, 500, 503, 504)


class RunHandler:
    """The handler of requests to run a variant.

    Args:
        job_runner: runs the jobs.
        settings: limits of a body.
    """

    def __init__(self, job_runner: JobRunner, settings: Settings) -> None:
        self.job_runner = job_runner
        self._max_body_bytes = settings.max_body_bytes

    async def read(self, request: Request, admission: AdmittedBody) -> ReceivedMessage:
        """Reads the body of a request; errors as those of `read_message`."""
        return await read_message(request, "inputs", self._max_body_bytes, admission)

    async def handle(
        self, request: Request, body: ReceivedMessage, kind: type[Plan], variant: str, group: str
    ) -> Response:
        """Runs one request.

        Args:
            request: the request.
            body: its body.
            kind: the class of the plan; `Plan` is a forward pass.
            variant: the variant's name.
            group: the field of the response with the tensors.

        Raises:
            QkvError: the request is invalid, or could not be run.
        """
        job = await self.job_runner.new_job(variant, body.message, kind)
        body.release()
        result = await self.job_runner.run(request, body.received_at, job)
        codec, encoding = body.response_codec, body.message.encoding or "base64"
        timing, known = timing_fields(result, job.plan), annotate(job.plan, result.notes)
        fields = {"variant": variant, group: None, **known, "timing": timing}
        message = Message(fields, result.outputs, encoding=encoding)
        size = result.nbytes * _RELATIVE_COST.get(encoding, 1.0) if codec is json else 0
        chunks = await in_thread_if_large(int(size), lambda: codec.encode(message, group))
        return TensorResponse(chunks, codec.MEDIA_TYPE, [server_timing(result.times)])


def attention_router(handler: RunHandler) -> APIRouter:
    """Returns the routes of runs: one for each variant, with models of its own."""
    routes = APIRouter(tags=["attention"], route_class=run_route(handler.job_runner, handler.read))
    for variant in catalogue.variants().values():
        _add_route(
            routes,
            handler,
            (Plan, variant.name, "outputs"),
            run_models.run_body(variant),
            f"/v1/attention/{variant.name}",
            operation_id=f"attend_{variant.name}",
            summary=variant.summary,
            description=f"`{variant.formula}`\n\nPaper: {variant.paper}.\n\nCost: {variant.cost}.",
            response_model=run_models.run_response(variant),
        )
    return routes


def gradients_router(handler: RunHandler) -> APIRouter:
    """Returns the routes of gradients, one for each variant that has them."""
    routes = APIRouter(tags=["gradients"], route_class=run_route(handler.job_runner, handler.read))
    for variant in catalogue.variants().values():
        if variant.backward is not None:
            _add_route(
                routes,
                handler,
                (GradientPlan, variant.name, "gradients"),
                run_models.gradients_body(variant),
                f"/v1/gradients/{variant.name}",
                operation_id=f"gradients_{variant.name}",
                summary=f"The gradients of {variant.name}.",
                description="Gradients of sum(grad_output * output) with respect to each floating "
                "input and each tensor of the layer.",
                response_model=run_models.gradients_response(variant),
            )
    return routes


def _add_route(
    routes: APIRouter,
    handler: RunHandler,
    run: tuple[type[Plan], str, str],
    body_type: Any,
    path: str,
    **described: Any,
) -> None:
    """Adds a route; `run` has the last arguments of `RunHandler.handle`."""
    *_, noun = run
    text = f"The {noun} by name; `variant` and `timing` as JSON under `qkv` in the metadata."

    async def endpoint(request: Request, body: body_type) -> Response:
        return await handler.handle(request, body, *run)

    routes.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_description=f"The requested {noun}, and the timing.",
        responses={
            200: {"headers": SERVER_TIMING, "content": in_safetensors(text)},
            **problem_responses(*_STATUSES),
        },
        dependencies=[DEADLINE],
        openapi_extra={
            "requestBody": {
                "description": "Tensors, parameters, and the requested outputs.",
                "content": in_safetensors(_REQUEST_FILE),
            }
        },
        **described,
    )


def unknown_router(handler: RunHandler) -> APIRouter:
    """Returns the routes of variants that do not exist, and of gradients that do not."""
    routes = APIRouter(include_in_schema=False)

    @routes.post("/v1/attention/{variant}")
    async def unknown_run(variant: str) -> Response:
        catalogue.find(variant)  # raises: known variants have routes of their own
        raise AssertionError

    @routes.post("/v1/gradients/{variant}")
    async def unknown_gradients(variant: str) -> Response:
        limits = handler.job_runner.limits
        GradientPlan.from_message(variant, Message(), limits)  # raises, as above
        raise AssertionError

    return routes
