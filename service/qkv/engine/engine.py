"""The engine: a work queue and the one thread that owns the device, without timers.

While the device runs a batch, jobs queue up. When it is free, a group of jobs with equal batch keys
runs next, up to a budget: that of the oldest job, or of the sender whose turn it is. At low load no
job waits; at high load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from qkv.attention.layers.layer import Layer
from qkv.engine.accounting import JobAccounting
from qkv.engine.admission import AdmissionController
from qkv.engine.batch_runner import DEVICE_RETRY_AFTER_S, BatchRunner, Launch
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.device import Device, MemoryUsage
from qkv.engine.device_errors import EngineStopped, MemoryBudget
from qkv.engine.executor import Launched, launch
from qkv.engine.load import Load
from qkv.engine.result import Result
from qkv.engine.small_jobs import SmallJobs
from qkv.engine.tenant import ANYONE, Tenant
from qkv.engine.warmup import warm_up
from qkv.engine.work_queue import (
    QueuedJob,
    WorkQueue,
)
from qkv.errors import (
    DeadlineExceeded,
    Internal,
    QkvError,
    ServiceUnavailable,
    TooManyRequests,
    stopping,
)
from qkv.jobs.job import Job
from qkv.telemetry.worker_state import WorkerState

__all__ = ["BATCH_BYTES", "DEFAULT_LIMIT", "GPU_MAX_BATCH", "Engine"]

_log = logging.getLogger("qkv.engine")

BATCH_BYTES: Final = 1 << 30
"""Limit of tensor bytes, in and out, in one batch beyond its first job."""
GPU_MAX_BATCH: Final = 64
"""Default limit of requests in one batch on a GPU."""
DEFAULT_LIMIT: Final = Load(1024, 4 << 30, 1 << 50)
"""Default limit of the queue."""

_WARM_UP_BATCH: Final = 4  # requests

_NICE: Final = 6  # added for the device thread on a CPU: a quarter of the event loop's weight
_MAX_NICE: Final = 19


class _BegunBatch(NamedTuple):
    """A batch that the device has begun."""

    queued_jobs: list[QueuedJob]
    started_at: float
    launched: Launched


class Engine:
    """A queue of jobs from one event loop, run on one device in one thread.

    Args:
        device: runs the jobs.
        max_batch: limit of jobs in one batch; 0: 1 on a CPU, 64 on a GPU.
        batch_bytes: limit of tensor bytes in one batch, beyond its first job.
        threads: CPU threads of one call.
        limit: limit of the queue.
        stack: True runs a batch as one call; None: on a GPU only (see `executor.launch`).
        idle_threads: returns the number of CPU threads that no other process needs now.
        on_busy: called with True when a batch starts and with False when it ends, from the device
            thread.
        verifier: checks the bits of stacked batches; None: one that checks samples.
        launch: begins a batch.
        preload: loaded layers that the device gets before it runs a job.

    Attributes:
        device_name: as responses give it.
        accounting: results and statistics of its jobs.
        admission: admits requests before their bodies are read.
        batch_runner: runs the batches.
        failed: set once no job can run in this process any more.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_batch: int = 0,
        batch_bytes: int = BATCH_BYTES,
        threads: int = 1,
        limit: Load = DEFAULT_LIMIT,
        stack: bool | None = None,
        idle_threads: Callable[[], int] = lambda: 1,
        on_busy: Callable[[bool], None] = lambda _: None,
        verifier: BatchVerifier | None = None,
        launch: Launch = launch,
        preload: Sequence[Layer] = (),
    ) -> None:
        self._preload = preload
        self.device, self.device_name = device, str(device.torch_device)
        self.accounting = JobAccounting(self.device_name)
        self._max_batch = max_batch or (GPU_MAX_BATCH if device.is_accelerator else 1)
        stack = device.is_accelerator if stack is None else stack
        self._runs_inline = not (device.is_accelerator or stack)
        self._idle_threads = idle_threads
        self._on_busy = on_busy
        self._queue = WorkQueue(limit)
        self.admission = AdmissionController(self._queue.shared_limit, self._queue.queued)
        self.failed = asyncio.Event()
        self._small_jobs = SmallJobs(self._run_small, self._expire)
        self._budget = MemoryBudget(batch_bytes)
        self.batch_runner = BatchRunner(
            device,
            stack,
            threads,
            self._budget,
            self.accounting,
            verifier=verifier or BatchVerifier(),
            launch=launch,
            idle_threads=self._threads_to_lend,
            on_fatal=self._fail_permanently,
        )
        self._finished_at = 0.0  # the last batch, by time.perf_counter
        self._running_flops = 0  # of the batches that have begun; only the device thread writes it
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run_thread, name="qkv-device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the device thread; call it on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def prepare(self, worker: WorkerState) -> None:
        """Warms up. Then statistics count the jobs, which are clients' only."""
        # an accelerator begins the first request at once; the others are a batch
        count = 1 + _WARM_UP_BATCH if self.device.is_accelerator else 1
        await warm_up(self, min(count, self._queue.shared_limit.limit.requests))
        self._queue.throughput.reset()  # a first call takes tens of milliseconds more
        self.accounting.stats_recorder = worker.stats_recorder
        self._queue.on_change = worker.set_queue
        worker.set_memory(self.memory_usage())

    async def stop(self) -> None:
        """Rejects new jobs, runs those that are queued, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        """True while the device thread runs."""
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """True while the engine accepts jobs."""
        # `is_alive` takes a lock; the device thread ends only if the engine stops or fails
        return self._loop is not None and not self._closing and not self.failed.is_set()

    @property
    def queued(self) -> Load:
        """The load of all queued jobs."""
        return self._queue.queued.total

    def memory_usage(self) -> MemoryUsage:
        """Returns this process's use of the device's memory."""
        return self.device.memory_usage()

    @property
    def unfinished_flops(self) -> int:
        """Floating-point operations of the jobs that are queued or run, without small ones."""
        return self.queued.flops + self._running_flops

    @property
    def flops_per_s(self) -> float | None:
        """Operations in a second of the last long batches; None if none has run."""
        return self._queue.throughput.flops_per_s

    def submit(
        self,
        job: Job,
        *,
        tenant: Tenant = ANYONE,
        priority: int = 0,
        wait_s: float | None = None,
        enqueued_at: float | None = None,
    ) -> asyncio.Future[Result]:
        """Queues a job; the future is resolved with its result. Cancelling the future removes it.

        Args:
            job: the job to run.
            tenant: whose job it is; the jobs of several take turns.
            priority: 1 is high, 3 is low; any other value is the default, 2.
            wait_s: seconds that it may be queued; then the future fails with DeadlineExceeded.
            enqueued_at: start of its wait, by `time.perf_counter`; None: now.

        Raises:
            ServiceUnavailable: too much is queued already, or the engine is stopping.
            TooManyRequests: too much of its tenant is, and others have jobs too.
            DeadlineExceeded: its deadline has passed already.
        """
        assert self._loop is not None
        future: asyncio.Future[Result] = self._loop.create_future()
        enqueued_at = time.perf_counter() if enqueued_at is None else enqueued_at
        deadline = None if wait_s is None else enqueued_at + wait_s
        queued_job = QueuedJob(job, future, priority, enqueued_at, deadline, tenant)
        (error,) = self.enqueue([queued_job])
        if error is not None:
            raise error
        future.add_done_callback(lambda _: self._on_cancelled(queued_job))
        return future

    def enqueue(self, queued_jobs: Sequence[QueuedJob]) -> list[QkvError | None]:
        """Queues jobs with one wake-up of the device thread; for one process's jobs of one turn.

        Returns:
            The error of each job that is not queued, as `submit` raises it; None for the others.
        """
        assert self._loop is not None
        errors: list[QkvError | None] = []
        with self._changed:
            for queued_job in queued_jobs:
                errors.append(self._put(queued_job))
            self._changed.notify()
        for queued_job, error in zip(queued_jobs, errors, strict=True):
            if error is None and queued_job.deadline is not None:
                remaining_s = max(0.0, queued_job.deadline - time.perf_counter())
                queued_job.timer = self._loop.call_later(remaining_s, self._on_deadline, queued_job)
        return errors

    def _put(self, queued_job: QueuedJob) -> QkvError | None:
        """Puts a job into the queue, whose lock is held; returns an error if that is impossible."""
        if queued_job.is_expired:
            return self._expire_queued(queued_job)
        if not self.is_ready:
            return self._unavailable_error()
        try:
            self._queue.put(queued_job)
        except (ServiceUnavailable, TooManyRequests) as error:
            return error
        return None

    @property
    def forms_batches(self) -> bool:
        """True if jobs can run together."""
        return self._max_batch > 1

    def run_inline(self, job: Job, enqueued_at: float | None = None) -> Result | None:
        """Runs a small job on the event loop; returns None for a job that must be queued.

        On a CPU the way to the device thread and back takes longer than a small job. It waits for
        no other job: the device thread may run a large one for seconds.

        Args:
            job: the job to run.
            enqueued_at: as for `submit`.

        Raises:
            ServiceUnavailable: the engine is stopping.
            QkvError: the job failed.
        """
        if not self._runs_inline or not job.plan.is_small:
            return None
        return self._run_small(job, enqueued_at or time.perf_counter())

    def submit_small(
        self, job: Job, *, tenant: Tenant = ANYONE, wait_s: float | None = None
    ) -> asyncio.Future[Result] | None:
        """Runs a small job as `run_inline` does, right behind those of other requests.

        Args:
            job, tenant, wait_s: as for `submit`.

        Returns:
            A future with its result or its error; None for a job that must be queued.
        """
        if not self._runs_inline or not job.plan.is_small:
            return None
        return self._small_jobs.submit(job, tenant, wait_s)

    def _run_small(self, job: Job, enqueued_at: float) -> Result:
        if not self.is_ready:
            raise self._unavailable_error()
        (result,) = self.batch_runner.run([job], [enqueued_at])
        if isinstance(result, QkvError):
            raise result
        return result

    def _on_cancelled(self, queued_job: QueuedJob) -> None:
        """Removes a job from the queue if its future is cancelled."""
        if queued_job.future.cancelled():
            self.remove(queued_job)

    def _on_deadline(self, queued_job: QueuedJob) -> None:
        """Fails the job if it is still queued; a running job gets its result."""
        if self.remove(queued_job) and not queued_job.future.done():  # it may be cancelled
            queued_job.future.set_exception(self._expire_queued(queued_job))

    def _expire_queued(self, queued_job: QueuedJob) -> DeadlineExceeded:
        assert queued_job.deadline is not None
        return self._expire(queued_job.job, queued_job.enqueued_at, queued_job.deadline)

    def _expire(self, job: Job, enqueued_at: float, deadline: float) -> DeadlineExceeded:
        """Records a job whose deadline has passed; returns its error."""
        self.accounting.record_failure(job, enqueued_at)
        wait_ms = (deadline - enqueued_at) * 1e3
        return DeadlineExceeded(
            f"the request waited {wait_ms:g} ms in the queue, its deadline passed"
        )

    def _unavailable_error(self) -> EngineStopped:
        if self.failed.is_set():
            return EngineStopped("the device has failed", retry_after=DEVICE_RETRY_AFTER_S)
        error = stopping()
        return EngineStopped(str(error), retry_after=error.retry_after)

    def remove(self, queued_job: QueuedJob) -> bool:
        """Removes a job from the queue; returns False if it is not queued any more."""
        if queued_job.timer is not None:
            queued_job.timer.cancel()
        with self._changed:
            return self._queue.remove(queued_job)

    def _run_thread(self) -> None:
        self.device.use_in_this_thread()
        self.device.layer_memory.preload(self._preload)
        if self._runs_inline and sys.platform == "linux":
            # the event loop runs small jobs beside a large one, and must not wait for a turn
            thread = threading.get_native_id()
            # only root may lower niceness, and Ray starts processes with 15
            niceness = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE, _MAX_NICE)
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
        begun: _BegunBatch | None = None
        while begun is not None or self._wait_for_job():
            try:
                begun = self._run_ahead(begun)
            except BaseException:  # nothing may end this loop: bugs are logged
                begun = None
                _log.exception("the engine failed")
                self._fail_permanently(Internal("the engine failed"))

    def _run_ahead(self, previous: _BegunBatch | None) -> _BegunBatch | None:
        """Begins the next batch, and finishes the previous one while the device computes.

        Returns the batch if the device still computes it; on a CPU it is finished here.
        """
        begun: _BegunBatch | None = None
        try:
            begun = self._begin(self._take_batch())
        finally:
            if previous is not None:
                self._finish(previous, is_last=begun is None)
        if begun is None or self.device.is_accelerator:
            return begun
        self._finish(begun)
        return None

    def _begin(self, batch: list[QueuedJob]) -> _BegunBatch | None:
        """Begins to run the jobs of a batch that have not expired; a busy event loop may not have
        called `_on_deadline` yet. Returns None if there are none."""
        flops = 0
        try:
            expired = [q for q in batch if q.is_expired]
            if expired:
                self._resolve([(q, self._expire_queued(q)) for q in expired])
                batch = [q for q in batch if q not in expired]
            if not batch:
                return None
            self._report_busy(True)
            started_at = time.perf_counter()
            flops = _flops_of(batch)
            self._running_flops += flops
            return _BegunBatch(batch, started_at, self.batch_runner.begin([q.job for q in batch]))
        except BaseException:
            _log.exception("the engine failed")
            self._running_flops -= flops
            error = Internal("the engine failed")
            self._resolve([(queued_job, error) for queued_job in batch])
            return None

    def _finish(self, begun: _BegunBatch, is_last: bool = True) -> None:
        """Waits for the results of a batch, and hands them over.

        `is_last`: the device has no other batch.
        """
        batch, started_at, launched = begun
        results: list[Result | QkvError] = [Internal("the engine failed")] * len(batch)
        try:
            jobs, enqueued_at = [q.job for q in batch], [q.enqueued_at for q in batch]
            results = self.batch_runner.finish(launched, jobs, enqueued_at)
        except BaseException:
            _log.exception("the engine failed")
        self._report_busy(not is_last)
        self._running_flops -= _flops_of(batch)
        # batches overlap on an accelerator: the time since the previous one is this one's
        now = time.perf_counter()
        started_at = max(started_at, self._finished_at)
        self._finished_at = now
        self._queue.throughput.add(
            Load.sum([queued_job.load for queued_job in batch]), now - started_at
        )
        self._resolve(list(zip(batch, results, strict=True)))

    def _report_busy(self, is_busy: bool) -> None:
        try:
            self._on_busy(is_busy)
        except Exception:  # a bug there must not cost a result
            _log.exception("the engine could not report its state")

    def _threads_to_lend(self, job: Job) -> int:
        """Returns the number of CPU threads that a job may use: more than one if it is alone."""
        is_alone = not job.plan.is_small and not self.queued.bytes
        return self._idle_threads() if is_alone else 1

    def _wait_for_job(self) -> bool:
        """Waits for a job; returns False if the engine is stopping and the queue is empty."""
        with self._changed:
            while self._queue.find_next() is None:
                if self._closing and not len(self._queue):
                    return False
                self._changed.wait()
        return True

    def _take_batch(self) -> list[QueuedJob]:
        """Takes the next batch up to the budget, without cancelled jobs; may be empty."""
        with self._changed:
            if (first := self._queue.find_next()) is None:
                return []
            return self._queue.take_batch(first, self._max_batch, self._budget.bytes)

    def _fail_permanently(self, error: QkvError) -> None:
        """Fails all queued jobs and sets `failed`; the supervisor then replaces the process."""
        with self._changed:
            removed = self._queue.clear()
        self._resolve([(queued_job, error) for queued_job in removed])
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: the process ends already
            self._loop.call_soon_threadsafe(self.failed.set)

    def _resolve(self, results: list[tuple[QueuedJob, Result | QkvError]]) -> None:
        """Hands a batch's results to the event loop in one call."""

        def set_results() -> None:
            for queued_job, result in results:
                if queued_job.timer is not None:
                    queued_job.timer.cancel()
                if queued_job.future.done():  # it is cancelled
                    continue
                if isinstance(result, Result):
                    queued_job.future.set_result(result)
                else:
                    queued_job.future.set_exception(result)

        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nothing awaits the results
            self._loop.call_soon_threadsafe(set_results)


def _flops_of(batch: list[QueuedJob]) -> int:
    return sum([queued_job.load.flops for queued_job in batch])
