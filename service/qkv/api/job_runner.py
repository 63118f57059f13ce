"""Runs jobs for HTTP clients: validation, deadlines, client disconnects, timing.

The endpoints share one `JobRunner` for each process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeVar

from fastapi import Request
from starlette.types import Receive

from qkv.api.request_body import in_thread_if_large
from qkv.api.request_record import current_tenant, record
from qkv.engine.admission import AdmittedBody
from qkv.engine.job_executor import JobExecutor
from qkv.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    MalformedRequest,
    QkvError,
    format_value,
)
from qkv.jobs.job import DEFAULT_PRIORITY, Job
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.plan_cache import PlanCache
from qkv.jobs.result import Result
from qkv.settings import Settings
from qkv.telemetry.worker_state import WorkerState
from qkv.wire.message import Message

_T = TypeVar("_T")

TIMEOUT_HEADER: Final = "X-Request-Timeout"
"""The header with the seconds that a request may wait in the queue. HTTP has no field for it, and
grpc-timeout is for gRPC; some gateways use this name."""

_DISCONNECTED: Final = "the client disconnected before its job ran"
_TIMEOUT_NAME: Final = TIMEOUT_HEADER.lower().encode()
_MAX_TIMEOUT_S: Final = 1e9


class JobRunner:
    """A runner of jobs for HTTP clients.

    Args:
        engine: runs the jobs.
        settings: limits and timeout of a request.
        worker: the state of this process.
        layers: that requests may name.

    Attributes:
        limits: of a request.
        worker: as the argument.
    """

    def __init__(
        self,
        engine: JobExecutor,
        settings: Settings,
        worker: WorkerState,
        layers: LoadedLayers = NO_LAYERS,
    ) -> None:
        self._engine, self.worker = engine, worker
        self._max_body_bytes = settings.max_body_bytes
        self._timeout_s = settings.request_timeout_s or None
        self.limits = job_limits(settings)._replace(layers=layers)
        self._plans = PlanCache(self.limits)

    def admit(self) -> AdmittedBody:
        """Admits a request before its body is read.

        Raises:
            ServiceUnavailable: the limits are reached.
            TooManyRequests: the share of the request's key is.
        """
        sent = record()
        declared = int(sent.headers.get(b"content-length", 0))
        # a body that is too large gets 413 later, even if the queue is full
        size = declared if declared <= self._max_body_bytes else 0
        return self._engine.admission.admit(size, sent.tenant)

    async def new_job(self, variant: str, message: Message, kind: type[Plan] = Plan) -> Job:
        """Validates a request.

        Args:
            variant: the variant's name.
            message: as for `Plan.from_message`.
            kind: the class of the plan; `Plan` is a forward pass.

        Raises:
            QkvError: from `Plan.from_message` and `Job.from_message`.
        """
        tensors = (*message.tensors.values(), *message.layer.values())
        # casting numbers without a dtype is slow; other tensors cost little
        size = sum([t.nbytes for t in tensors if t.is_untyped])
        return await in_thread_if_large(size, lambda: self._plans.new_job(kind, variant, message))

    async def run(
        self,
        request: Request,
        received_at: float,
        job: Job,
        *,
        priority: int = DEFAULT_PRIORITY,
        wait_s: float | None = None,
    ) -> Result:
        """Runs a job.

        Args:
            request: the request of the job; if its client disconnects, the job is cancelled.
            received_at: time of its last byte, by `time.perf_counter`.
            job: the job.
            priority: as for `Engine.submit`.
            wait_s: seconds from `received_at` that it may be queued. The smallest of this, the
                header and the settings holds.

        Raises:
            QkvError: from the engine; ClientDisconnected if the client disconnects.
        """
        sent = record()
        deadline_s = self.deadline_s()
        if deadline_s is not None and (wait_s is None or deadline_s < wait_s):
            wait_s = deadline_s
        try:
            future = self._engine.submit(
                job,
                tenant=sent.tenant,
                priority=priority,
                wait_s=_remaining(wait_s, received_at),
            )
            result = await cancel_on_disconnect(request, future)
        except DeadlineExceeded:
            assert wait_s is not None
            raise DeadlineExceeded(
                f"the request waited {wait_s * 1e3:g} ms in the queue, its deadline passed"
            ) from None
        result.times.total_s = time.perf_counter() - received_at
        sent.add_run(result.times, job.plan)
        return result

    def deadline_s(self) -> float | None:
        """Returns the seconds that a request may be queued, by header and settings; None: no limit.

        Raises:
            MalformedRequest: the header is not a valid number.
        """
        timeout_s = _parse_timeout(record().headers)
        if timeout_s is None or self._timeout_s is None:
            return self._timeout_s if timeout_s is None else timeout_s
        return min(timeout_s, self._timeout_s)

    async def run_part(
        self, job: Job, wait_s: float | None, *, priority: int = DEFAULT_PRIORITY
    ) -> Result:
        """Queues and runs one of several jobs of a request, without counting it as a request.

        Raises:
            QkvError: from the engine.
        """
        return await self._engine.submit(
            job, tenant=current_tenant(), priority=priority, wait_s=wait_s
        )

    def admit_bytes(self, size: int) -> AdmittedBody:
        """Admits inputs that this process generates, like a body of that size.

        Raises:
            ServiceUnavailable: the limits are reached.
            TooManyRequests: the share of the request's key is.
        """
        return self._engine.admission.admit(size, current_tenant())


def job_limits(settings: Settings) -> Limits:
    """Returns the limits of a request."""
    return Limits(
        response_bytes=settings.max_response_bytes,
        job_bytes=settings.max_queue_bytes,
        score_count=settings.max_scores,
    )


def _remaining(wait_s: float | None, received_at: float) -> float | None:
    """Returns what is left of the seconds that a request may wait."""
    return None if wait_s is None else max(0.0, wait_s - (time.perf_counter() - received_at))


def _parse_timeout(headers: Mapping[bytes, bytes]) -> float | None:
    """Returns the seconds of the timeout header; None: there is no header."""
    if (value := headers.get(_TIMEOUT_NAME)) is None:
        return None
    text = value.decode("latin-1")
    try:
        seconds = (
            float(text) if "_" not in text else 0.0
        )  # Python reads 1_0 as a number; HTTP clients do not
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_TIMEOUT_S:  # false for NaN too
        raise MalformedRequest(
            f"{TIMEOUT_HEADER} is invalid: got {format_value(text)}, expected seconds above 0, "
            f"at most {_MAX_TIMEOUT_S:.0f}"
        )
    return seconds


async def cancel_on_disconnect(request: Request, future: asyncio.Future[_T]) -> _T:
    """Returns the future's result; cancels it if the client disconnects first.

    Raises:
        ClientDisconnected: the client disconnected.
    """
    watch: asyncio.Task[None] | None = None
    try:
        await asyncio.sleep(0)  # small jobs run in this turn of the event loop
        if not future.done():
            watch = asyncio.create_task(until_disconnect(request.receive))
            watch.add_done_callback(lambda _: future.cancel())
        return await future
    except asyncio.CancelledError:
        if watch is not None and watch.done() and future.cancelled():
            raise ClientDisconnected(_DISCONNECTED) from None
        raise
    finally:
        future.cancel()
        if watch is not None:
            watch.cancel()


async def until_disconnect(receive: Receive) -> None:
    """Waits until the client disconnects, or sends a malformed body that nobody reads."""
    with suppress(QkvError):
        while (await receive())["type"] != "http.disconnect":
            pass
