"""`SmallJobs`: the small jobs of a turn of the event loop, run in a row."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from qkv.engine.fair_order import FairOrder
from qkv.engine.load import Load
from qkv.engine.result import Result
from qkv.engine.tenant import Tenant
from qkv.jobs.job import Job

__all__ = ["SmallJobs"]

# That run in a turn while several tenants wait. With fewer the shares are more exact, but 2 took a
# quarter of the rate of small requests, and 8 take a tenth.
_COMPETING_JOBS: Final = 8

_WaitingJob = tuple[Job, "asyncio.Future[Result | None]"]


class SmallJobs:
    """Runs small jobs on the event loop, once the other requests of this turn have brought theirs.

    Jobs in a row take less time: torch's code and tables stay in the CPU's caches. The jobs of one
    tenant all run in the turn. While several tenants wait, a few run in each turn, in `FairOrder`.

    Args:
        run_inline: runs a job.
    """

    def __init__(self, run_inline: Callable[[Job], Result | None]) -> None:
        self._run_inline = run_inline
        self._fair_order = FairOrder()
        self._lines: dict[Tenant, deque[_WaitingJob]] = {}

    async def run(self, job: Job, tenant: Tenant) -> Result | None:
        """Runs a job; result and errors as those of `run_inline`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result | None] = loop.create_future()
        if not self._lines:
            loop.call_soon(self._run_turn)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = deque()
            self._fair_order.join(tenant)
        line.append((job, future))
        return await future

    def _run_turn(self) -> None:
        if len(self._lines) == 1:
            ((_, line),) = self._lines.items()
            self._lines = {}
            for job, future in line:
                self._run(job, future)
            return
        for _ in range(_COMPETING_JOBS):
            if self._lines:
                self._run(*self._take_next())
        if self._lines:
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _take_next(self) -> _WaitingJob:
        tenant = self._fair_order.first(self._lines)
        line = self._lines[tenant]
        job, future = line.popleft()
        if not line:
            del self._lines[tenant]
        if not future.cancelled():
            self._fair_order.begin(tenant)
            load = Load(1, job.plan.bytes, job.plan.flops)
            self._fair_order.charge(tenant, load.work)
        return job, future

    def _run(self, job: Job, future: asyncio.Future[Result | None]) -> None:
        if future.cancelled():
            return
        try:
            future.set_result(self._run_inline(job))
        except BaseException as error:
            future.set_exception(error)
