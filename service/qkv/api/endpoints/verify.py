"""POST /v1/verify/{variant}: draws the inputs of a case, and judges outputs for them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

import torch
from fastapi import APIRouter, Request, Response

from qkv.api.case_limits import MAX_NUMBERS
from qkv.api.case_messages import draw_case, judge_case
from qkv.api.case_token import CaseSigner
from qkv.api.job_runner import JobRunner, cancel_on_disconnect
from qkv.api.request_body import ReceivedMessage, TensorResponse, read_message
from qkv.attention import catalogue
from qkv.errors import DeadlineExceeded, ServiceUnavailable
from qkv.settings import Settings
from qkv.wire import json, require_acceptable

__all__ = ["MAX_BODY_BYTES", "router"]

MAX_BODY_BYTES: Final = 64 * MAX_NUMBERS
"""Limit of the body: 64 bytes for each number of the largest case. In lists, float64 takes 26."""

_MOST_ACCEPTED: Final = 32
_RETRY_AFTER_S: Final = _MOST_ACCEPTED // 4  # if each takes 0.25 s, as a large right output
_LATE: Final = "the case was not drawn or judged in time, its deadline passed"

_T = TypeVar("_T")


class CaseThread:
    """One thread of this process for all cases, so that other requests keep the other cores.

    The work of a request that waits is cancelled if its client disconnects or its deadline passes.
    Work that has begun runs to its end: a thread cannot be stopped.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "verify", _use_one_core)
        self._accepted = 0

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
        if self._accepted >= _MOST_ACCEPTED:
            text = f"{self._accepted} cases wait to be drawn or judged"
            raise ServiceUnavailable(text, retry_after=_RETRY_AFTER_S)
        left_s = math.inf if wait_s is None else wait_s - (time.perf_counter() - received_at)
        if left_s <= 0:
            raise DeadlineExceeded(_LATE)
        submitted = self._threads.submit(work)
        self._accepted += 1
        try:
            with _cancelled_after(left_s, submitted):
                return await cancel_on_disconnect(request, asyncio.wrap_future(submitted))
        finally:
            self._accepted -= 1


def _use_one_core() -> None:
    """Lets torch use one core in this thread."""
    # a thread takes the number that any thread set last, when it first needs one. A number that is
    # set sooner is lost then, so the thread asks for it first. The engine sets its own for each job
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _cancelled_after(left_s: float, submitted: Future[_T]) -> Iterator[None]:
    """Cancels work that has not begun in time.

    Raises:
        DeadlineExceeded: it is cancelled.
    """
    is_late = False

    def expire() -> None:
        nonlocal is_late
        is_late = submitted.cancel()  # false if the work has begun

    loop = asyncio.get_running_loop()
    timer = loop.call_later(left_s, expire) if left_s < math.inf else None
    try:
        yield
    except asyncio.CancelledError:
        if is_late:
            raise DeadlineExceeded(_LATE) from None
        raise
    finally:
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
            work = _work(request, variant, received, signer)
            # admitted until the end: the tensors of the request stay in memory while it waits
            return await thread.run(request, received.received_at, wait_s, work)

    return routes


def _work(
    request: Request, variant: str, received: ReceivedMessage, signer: CaseSigner
) -> Callable[[], Response]:
    """Returns the function that draws or judges the case of a request.

    Raises:
        NotAcceptable: the request does not accept a verdict, which is JSON.
    """
    message, codec = received.message, received.response_codec
    if "case" not in message.fields:
        return lambda: TensorResponse(
            codec.encode(draw_case(variant, message, signer), "inputs"), codec.MEDIA_TYPE
        )
    require_acceptable(", ".join(request.headers.getlist("accept")), json.MEDIA_TYPE)
    return lambda: Response(
        json.dump(judge_case(variant, message, signer)), media_type=json.MEDIA_TYPE
    )
