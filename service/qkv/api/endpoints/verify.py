"""POST /v1/verify/{variant}: draws the inputs of a case, and judges outputs for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch
from fastapi import APIRouter, Request, Response

from qkv.api.case_messages import draw_case, judge_case
from qkv.api.case_token import CaseSigner
from qkv.api.job_runner import JobRunner, cancel_on_disconnect
from qkv.api.request_body import TensorResponse, read_message
from qkv.attention import catalogue
from qkv.errors import DeadlineExceeded, ServiceUnavailable
from qkv.settings import Settings
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 32 << 20
"""Limit of the body: as many float64 numbers in lists as a case has."""

_MOST_WAITING: Final = 32
_RETRY_AFTER_S: Final = 8

_T = TypeVar("_T")


class CaseThread:
    """One thread of this process for all cases, so that other requests keep the other cores.

    The work of a request that waits is cancelled if its client disconnects or its deadline passes.
    Work that has begun runs to its end: a thread cannot be stopped.
    """

    def __init__(self) -> None:
        # torch's threads are a number of each thread; the engine sets its own before each job
        self._threads = ThreadPoolExecutor(1, "verify", torch.set_num_threads, (1,))
        self._waiting = 0

    async def run(
        self, request: Request, received_at: float, wait_s: float | None, work: Callable[[], _T]
    ) -> _T:
        """Runs the work of a request.

        Args:
            request: the request; if its client disconnects, the work is cancelled.
            received_at: time of its last byte, by `time.perf_counter`.
            wait_s: seconds from then that it may wait; None: no limit.
            work: the function to run.

        Raises:
            QkvError: from the work.
            ClientDisconnected: the client disconnected first.
            DeadlineExceeded: the work did not begin in time.
            ServiceUnavailable: too many requests wait.
        """
        if self._waiting >= _MOST_WAITING:
            text = f"{self._waiting} cases wait to be drawn or judged"
            raise ServiceUnavailable(text, retry_after=_RETRY_AFTER_S)
        submitted = self._threads.submit(work)
        is_late = False

        def expire() -> None:
            nonlocal is_late
            is_late = submitted.cancel()  # false if the work has begun

        timer = None
        if wait_s is not None:
            left_s = max(0.0, wait_s - (time.perf_counter() - received_at))
            timer = asyncio.get_running_loop().call_later(left_s, expire)
        self._waiting += 1
        try:
            return await cancel_on_disconnect(request, asyncio.wrap_future(submitted))
        except asyncio.CancelledError:
            if is_late:
                raise DeadlineExceeded(
                    "the case was not drawn or judged in time, its deadline passed"
                ) from None
            raise
        finally:
            self._waiting -= 1
            if timer is not None:
                timer.cancel()


def router(job_runner: JobRunner, settings: Settings) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["verification"])
    assert settings.verify_secret is not None  # `create_app` draws one
    signer = CaseSigner(settings.verify_secret.get_secret_value())
    thread, limit = CaseThread(), min(MAX_BODY_BYTES, settings.max_body_bytes)

    @routes.post(
        "/v1/verify/{variant}",
        operation_id="verify",
        summary="Draws inputs, and judges the outputs of your attention for them.",
        description="Two requests. The first draws a case: inputs, and a signed token that stands "
        "for them. The second has the token and your outputs, and gets the verdict: the worst "
        "error against float64, its budget, and the names of known bugs that give these outputs. "
        "The service stores nothing.",
    )
    async def verify(request: Request) -> Response:
        variant = request.path_params["variant"]
        catalogue.find(variant)
        wait_s = job_runner.deadline_of(request)
        with job_runner.admit(request) as admission:
            received = await read_message(request, "outputs", limit, admission.grow)
            message, codec = received.message, received.response_codec
            if "case" in message.fields:
                accept = ", ".join(request.headers.getlist("accept"))
                require_acceptable(accept, json.MEDIA_TYPE)
                content = await thread.run(
                    request,
                    received.received_at,
                    wait_s,
                    lambda: json.dump(judge_case(variant, message, signer)),
                )
                return Response(content, media_type=json.MEDIA_TYPE)
            chunks = await thread.run(
                request,
                received.received_at,
                wait_s,
                lambda: codec.encode(draw_case(variant, message, signer), "inputs"),
            )
        return TensorResponse(chunks, codec.MEDIA_TYPE)

    return routes
