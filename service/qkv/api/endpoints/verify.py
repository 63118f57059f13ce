"""POST /v1/verify/{variant}: draws the inputs of a case, and judges outputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Request, Response

from qkv.api.case_limits import MAX_NUMBERS
from qkv.api.case_messages import draw_case, judge_case
from qkv.api.job_runner import JobRunner
from qkv.api.request_body import ReceivedMessage, TensorResponse, read_message
from qkv.api.work_threads import WorkThreads
from qkv.attention import catalogue
from qkv.settings import Settings
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 64 * MAX_NUMBERS
"""Limit of the body: 64 bytes for each number of the largest case. In lists, float64 takes 26."""


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["verification"])
    threads, limit = WorkThreads("verify", 1), min(MAX_BODY_BYTES, settings.max_body_bytes)

    @routes.post(
        "/v1/verify/{variant}",
        operation_id="verify",
        summary="Draws inputs, and judges the outputs of your attention for them.",
        description="Two requests. The first draws a case: inputs, and the specification that "
        "draws them. The second has this specification and your outputs, and gets the verdict: the "
        "worst error against float64, its budget, and the names of known bugs that give these "
        "outputs. The service stores nothing.",
    )
    async def verify(request: Request) -> Response:
        variant = request.path_params["variant"]
        catalogue.find(variant)
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(request, "outputs", limit, admission.grow)
            admission.is_received = True
            work = _work(request, variant, received)
            # admitted until the end: the tensors of the request stay in memory while it waits
            return await threads.run(request, received.received_at, wait_s, lambda _: work())

    return routes


def _work(request: Request, variant: str, received: ReceivedMessage) -> Callable[[], Response]:
    """Returns the function that draws or judges the case of a request.

    Raises:
        NotAcceptable: the request does not accept a verdict, which is JSON.
    """
    message, codec = received.message, received.response_codec
    if "case" not in message.fields:
        return lambda: TensorResponse(
            codec.encode(draw_case(variant, message), "inputs"), codec.MEDIA_TYPE
        )
    require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
    return lambda: Response(json.dump(judge_case(variant, message)), media_type=json.MEDIA_TYPE)
