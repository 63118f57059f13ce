"""`SmallJobs`: the small jobs of a turn of the event loop, run in a row."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from qkv.engine.fair_order import FairOrder
from qkv.engine.load import Load
from qkv.engine.result import Result
from qkv.engine.tenant import Tenant
from qkv.errors import QkvError
from qkv.jobs.job import Job

__all__ = ["SmallJobs"]

# That run in a turn while several tenants wait. With fewer the shares are more exact, but 2 took a
# quarter of the rate of small requests, and 8 take a tenth.
_COMPETING_JOBS: Final = 8


class _WaitingJob(NamedTuple):
    job: Job
    future: asyncio.Future[Result]
    enqueued_at: float
    deadline: float | None


class SmallJobs:
    """Small jobs that run on the event loop, once the requests of this turn have brought theirs.

    Jobs in a row take less time: torch's code and tables stay in the CPU's caches. The jobs of one
    tenant all run in the turn. While several tenants wait, a few run in each turn, in `FairOrder`.

    Args:
        run_inline: runs a job, which has waited since a time by `time.perf_counter`.
        expire: returns the error of a job that has waited from one time to another.
    """

    def __init__(
        self,
        run_inline: Callable[[Job, float], Result],
        expire: Callable[[Job, float, float], QkvError],
    ) -> None:
        self._run_inline, self._expire = run_inline, expire
        self._fair_order = FairOrder()
        self._lines: dict[Tenant, deque[_WaitingJob]] = {}

    def submit(self, job: Job, tenant: Tenant, wait_s: float | None) -> asyncio.Future[Result]:
        """Adds a job to this turn; cancelling the future removes it.

        Args:
            job: the job to run.
            tenant: whose job it is.
            wait_s: seconds after which it fails instead; None: it waits for as long as it takes.
        """
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        future: asyncio.Future[Result] = loop.create_future()
        if not self._lines:
            loop.call_soon(self._run_turn)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = deque()
            self._fair_order.join(tenant)
        line.append(_WaitingJob(job, future, now, None if wait_s is None else now + wait_s))
        return future

    def _run_turn(self) -> None:
        if len(self._lines) == 1:
            ((_, line),) = self._lines.items()
            self._lines = {}
            for waiting in line:
                self._run(waiting)
            return
        for _ in range(_COMPETING_JOBS):
            if self._lines:
                self._run(self._take_next())
        if self._lines:
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _take_next(self) -> _WaitingJob:
        tenant = self._fair_order.first(self._lines)
        line = self._lines[tenant]
        waiting = line.popleft()
        if not line:
            del self._lines[tenant]
        if not waiting.future.cancelled():
            self._fair_order.begin(tenant)
            plan = waiting.job.plan
            self._fair_order.charge(tenant, Load(1, plan.bytes, plan.flops).work)
        return waiting

    def _run(self, waiting: _WaitingJob) -> None:
        job, future, enqueued_at, deadline = waiting
        if future.cancelled():
            return
        try:
            if deadline is not None and deadline <= time.perf_counter():
                raise self._expire(job, enqueued_at, deadline)
            future.set_result(self._run_inline(job, enqueued_at))
        except BaseException as error:
            future.set_exception(error)
