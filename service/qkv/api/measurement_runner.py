"""Runs the plans of comparisons and sweeps for HTTP clients, and computes on the host for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from qkv.api.job_runner import JobRunner
from qkv.api.work_threads import use_one_core
from qkv.attention.layers.layer import Layer
from qkv.engine.admission import AdmittedBody
from qkv.engine.thread_priority import yield_to_event_loop
from qkv.jobs.job import DEFAULT_PRIORITY, Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor

_T = TypeVar("_T")


class HostThread:
    """The thread of a process that computes figures, or draws inputs, one after another.

    There is one, because several comparisons would otherwise take the cores of the runs.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "qkv-host", _yield_to_runs)

    async def compute(self, work: Callable[[], _T]) -> _T:
        """Returns the result of work; if it is cancelled, it waits for work that has begun."""
        running = self._executor.submit(work)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not running.cancel():
                await asyncio.wait((future,))
                future.exception()  # else asyncio logs it
            raise


def _yield_to_runs() -> None:
    use_one_core()
    yield_to_event_loop()


class MeasurementRunner:
    """The `Runner` of one comparison or sweep: the engine runs its plans.

    Args:
        job_runner: runs them.
        host: computes.
        wait_s: seconds that each run may be queued; None: no limit.
        priority: of each run.
        check: called before each run; it raises to end the comparison or the sweep.
    """

    def __init__(
        self,
        job_runner: JobRunner,
        host: HostThread,
        wait_s: float | None,
        *,
        priority: int = DEFAULT_PRIORITY,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._job_runner, self._wait_s, self._priority = job_runner, wait_s, priority
        self._check = check
        self.compute = host.compute

    async def run(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Result:
        """Queues and runs a plan; errors are those of the engine and of `check`."""
        self._check()
        job = Job(plan, tensors, layer)
        return await self._job_runner.run_part(job, self._wait_s, priority=self._priority)

    def reserve(self, size: int) -> AdmittedBody:
        """Admits inputs that this process draws, like a body of that size.

        Raises:
            ServiceUnavailable: the limits are reached.
            TooManyRequests: the share of the request's key is.
        """
        self._check()
        return self._job_runner.admit_bytes(size)
