"""A run over HTTP, whatever protocol asks for it: a message in, outputs and timing out."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple, TypeVar

from fastapi import Request

from qkv.api.request_body import elsewhere
from qkv.engine.accounting import Alone
from qkv.engine.admission import Place
from qkv.engine.engine import Engine
from qkv.engine.executor import Standing
from qkv.engine.remote.remote_engine import Remote
from qkv.engine.work_queue import Answer
from qkv.errors import Left, TooLate, Unparseable, shown
from qkv.jobs.job import Job, Limits
from qkv.settings import Settings
from qkv.telemetry.metrics import Meter
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = [
    "SERVER_TIMING",
    "TIMEOUT_HEADER",
    "Result",
    "Runs",
    "left",
    "limits_of",
    "result_of",
    "unless_left",
]

_T = TypeVar("_T")

TIMEOUT_HEADER: Final = "X-Request-Timeout"
"""Seconds that a request may wait for its turn. HTTP has no field for it, and gRPC's grpc-timeout
is for gRPC; by this name it goes through gateways that know it, beside X-Request-ID."""

_LONGEST_S: Final = 1e9

_STAGES: Final = ("queue", "transfer", "compute", "total")
SERVER_TIMING: Final = ", ".join(f"{stage};dur=%({stage}_ms).4f" for stage in _STAGES)
"""A timing as W3C's Server Timing has it, in milliseconds; to be filled in."""


class Result(NamedTuple):
    """What came of a run.

    Attributes:
        outputs: by name.
        timing: as an answer has it, `total_ms` too.
        marks: what else an answer says of them.
    """

    outputs: dict[str, RawTensor]
    timing: dict[str, Any]
    marks: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(tensor.nbytes for tensor in self.outputs.values())

    @property
    def server_timing(self) -> str:
        """The timing as W3C's Server Timing has it, in milliseconds."""
        return SERVER_TIMING % self.timing

    @property
    def headers(self) -> dict[str, str]:
        """What an answer says of it in headers."""
        return {"Server-Timing": self.server_timing}


class Runs:
    """Runs for callers who may leave meanwhile.

    Args:
        engine: what runs them.
        settings: their limits.
        meter: counts what they took.

    Attributes:
        limits: what each may ask for.
    """

    def __init__(self, engine: Engine | Remote, settings: Settings, meter: Meter) -> None:
        self._engine, self._meter = engine, meter
        self._max_body_bytes = settings.max_body_bytes
        self._timeout_s = settings.request_timeout_s or None
        self.limits = limits_of(settings)

    def enter(self, request: Request) -> Place:
        """Room for a request, before its body is read.

        Raises:
            NotNow: there is none.
        """
        declared = int(request.headers.get("content-length", 0))
        # one that is too long is refused for that, whatever waits
        return self._engine.door.enter(declared if declared <= self._max_body_bytes else 0)

    async def job(self, variant: str, message: Message, kind: type[Job] = Job) -> Job:
        """Checks what is asked for.

        Args:
            variant: what to run.
            message: as `Job.of` takes it.
            kind: of job; Job itself is a forward pass.

        Raises:
            QkvError: from `Job.of`.
        """
        every = (*message.tensors.values(), *message.layer.values())
        # numbers without a dtype are converted, one by one; of others only a few are looked at
        size = sum(t.nbytes for t in every if t.literal)
        return await elsewhere(size, lambda: kind.of(variant, message, self.limits))

    async def run(
        self,
        request: Request,
        received: float,
        job: Job,
        *,
        priority: int = 0,
        wait_s: float | None = None,
    ) -> Result:
        """Has a job run.

        Args:
            request: where it came from: if its caller leaves, its place in the queue is free.
            received: when its last byte came, by `time.perf_counter`.
            job: what to run.
            priority: as `Engine.submit` takes it.
            wait_s: seconds from `received` on that it may wait for its turn; what its header and
                the settings say holds too.

        Raises:
            QkvError: from the engine; Left where the caller has left.
        """
        wait_s = _shortest(wait_s, self.patience_of(request))
        left_s = None
        if wait_s is not None:
            left_s = max(0.0, wait_s - (time.perf_counter() - received))
        answer = None if left_s == 0 else self._engine.run_now(job)
        if answer is None:
            try:
                future = self._engine.submit(job, priority=priority, wait_s=left_s)
                answer = await unless_left(request, future)
            except TooLate:
                assert wait_s is not None
                raise TooLate(f"the device was not free within {wait_s * 1e3:g} ms") from None
        result = result_of(answer, received, job)
        queue_ms, compute_ms = result.timing["queue_ms"], result.timing["compute_ms"]
        self._meter.ran(job.variant.name, queue_ms / 1e3, compute_ms / 1e3)
        return result

    def patience_of(self, request: Request) -> float | None:
        """Seconds that a request may wait for its turn, by its header and the settings; None: any
        number.

        Raises:
            Unparseable: the header holds no such number.
        """
        return _shortest(self._timeout_s, _timeout_of(request))

    async def measure(self, job: Job, wait_s: float | None, *, priority: int = 0) -> Answer:
        """Has one of several jobs that a request is made of run; it waits as all others do, and is
        not counted as a request.

        Raises:
            QkvError: from the engine.
        """
        return await self._engine.submit(job, priority=priority, wait_s=wait_s)

    def room(self, size: int) -> Place:
        """Room for so many bytes that are made here, as if they came in a body.

        Raises:
            NotNow: there is none.
        """
        return self._engine.door.enter(size)

    def runs_now(self, job: Job) -> bool:
        """Whether such a job runs as soon as it is there, if nothing else does."""
        return self._engine.runs_now(job)

    def run_standing(self, standing: Standing) -> Alone | None:
        """Runs what stands ready, as `Engine.run_standing` does."""
        return self._engine.run_standing(standing)

    def count_standing(self, alone: Alone) -> None:
        """Counts what stood ready and ran, once there is an answer; it did not wait."""
        alone.record()
        self._meter.ran(alone.job.variant.name, 0.0, alone.ran.compute_s)


def result_of(answer: Answer, received: float, job: Job) -> Result:
    """What came of a run whose request's last byte came at `received`."""
    timing = answer.timing
    timing["total_ms"] = (time.perf_counter() - received) * 1e3
    return Result(answer.outputs, timing, job.marks)


def limits_of(settings: Settings) -> Limits:
    """What each request may ask for."""
    return Limits(
        answer=settings.max_answer_bytes,
        request=settings.max_queue_bytes,
        scores=settings.max_scores,
    )


def _timeout_of(request: Request) -> float | None:
    """Seconds that a request says it may wait."""
    if (said := request.headers.get(TIMEOUT_HEADER)) is None:
        return None
    try:
        seconds = float(said) if "_" not in said else 0.0  # 1_0 is a number in Python alone
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:  # NaN is not either
        raise Unparseable(f"{TIMEOUT_HEADER} came as {shown(said)}; it must be seconds, above 0")
    return seconds


def _shortest(*seconds: float | None) -> float | None:
    return min((s for s in seconds if s is not None), default=None)


async def unless_left(request: Request, future: asyncio.Future[_T]) -> _T:
    """The future's result; a caller that leaves meanwhile gives its place in the queue back.

    Raises:
        Left: the caller has left.
    """
    leaving = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise Left("the caller left before its turn came")
        return await future
    finally:
        leaving.cancel()
        future.cancel()


async def left(request: Request) -> None:
    """Returns when the caller leaves; the body has come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
