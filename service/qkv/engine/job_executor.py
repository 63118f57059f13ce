"""`JobExecutor`: the interface of `Engine` and `RemoteEngine`, which run the jobs of a process."""

from __future__ import annotations

import asyncio
from typing import Protocol

from qkv.engine.admission import AdmissionController
from qkv.engine.device.device import MemoryUsage
from qkv.engine.result import Result
from qkv.engine.tenant import ANYONE, Tenant
from qkv.jobs.job import Job
from qkv.telemetry.worker_state import WorkerState

__all__ = ["JobExecutor"]


class JobExecutor(Protocol):
    """An executor of the jobs of one process, on its own device or in device processes.

    Attributes:
        admission: admits requests before their bodies are read.
        failed: set once no job can run in this process any more.
    """

    admission: AdmissionController
    failed: asyncio.Event

    @property
    def device_name(self) -> str:
        """The device, as responses give it; several have commas between them."""

    def start(self) -> None:
        """Starts; call it on the event loop that will submit jobs."""

    async def prepare(self, worker: WorkerState) -> None:
        """Returns once jobs can run, or the service drains.

        Args:
            worker: this process's part of the shared state.
        """

    async def stop(self) -> None:
        """Rejects new jobs, and awaits the results of submitted jobs."""

    @property
    def is_alive(self) -> bool:
        """True unless only a restart of this process could make jobs run."""

    @property
    def is_ready(self) -> bool:
        """True while jobs are accepted."""

    def memory_usage(self) -> MemoryUsage:
        """Returns this process's use of the device's memory."""

    def submit(
        self,
        job: Job,
        *,
        tenant: Tenant = ANYONE,
        priority: int = 0,
        wait_s: float | None = None,
    ) -> asyncio.Future[Result]:
        """Queues a job; the future is resolved with its result. Cancelling the future removes it.

        Args:
            job: the job to run.
            tenant: whose job it is; the jobs of several take turns.
            priority: 1 is high, 3 is low; any other value is the default, 2.
            wait_s: seconds that it may be queued; then the future fails with DeadlineExceeded.

        Raises:
            ServiceUnavailable: too much is queued already, or no job can run now.
            TooManyRequests: too much of its tenant is, and others have jobs too.
            DeadlineExceeded: its deadline has passed already.
        """

    def submit_small(
        self, job: Job, *, tenant: Tenant = ANYONE, wait_s: float | None = None
    ) -> asyncio.Future[Result] | None:
        """Runs a small job on the event loop, right behind those of other requests; the jobs of
        several tenants take turns.

        Args:
            job, tenant, wait_s: as for `submit`.

        Returns:
            A future with its result or its error; None for a job that must be submitted.
        """
