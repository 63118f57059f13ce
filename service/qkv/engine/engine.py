"""The engine: a queue of jobs for the one thread that owns the device, without timers.

While the device runs a batch, jobs queue up. When it is free, a group of jobs with equal batch keys
runs next, up to a budget: that of the oldest job, or of the sender whose turn it is. At low load no
job waits; at high load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from qkv.attention.layers.layer import Layer
from qkv.engine.admission import Admission
from qkv.engine.batch_runner import DEVICE_RETRY_AFTER_S, BatchRunner, Launch
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.device import Device, MemoryUsage
from qkv.engine.device_errors import EngineStopped, MemoryBudget
from qkv.engine.device_thread import DeviceThread
from qkv.engine.executor import launch
from qkv.engine.lane import JobQueue, Lane, VirtualTimes
from qkv.engine.warmup import warm_up
from qkv.errors import QkvError, stopping
from qkv.jobs.job import DEFAULT_PRIORITY, Job
from qkv.jobs.load import Load
from qkv.jobs.result import Result
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.telemetry.worker_state import WorkerState

BATCH_BYTES: Final = 1 << 30
"""Limit of tensor bytes, in and out, in one batch beyond its first job."""
GPU_MAX_BATCH: Final = 64
"""Default limit of requests in one batch on a GPU."""
DEFAULT_LIMIT: Final = Load(1024, 4 << 30, 1 << 50)
"""Default limit of the queue."""

_WARM_UP_BATCH: Final = 4  # requests

# Small jobs that run in a turn of the event loop while several tenants wait. With fewer the shares
# are more exact, but 2 took a quarter of the rate of small requests, and 8 take a tenth.
_COMPETING_JOBS: Final = 8


class Engine:
    """A queue of jobs from one event loop, run on one device in one thread.

    On a CPU small jobs run on the event loop instead: the way to the device thread and back takes
    longer than such a job, and the thread may run a large one for seconds.

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
        admission: admits requests before their bodies are read, and has what queued jobs hold.
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
        self.device, self.device_name = device, str(device.torch_device)
        stack = device.is_accelerator if stack is None else stack
        self._has_small_jobs = not (device.is_accelerator or stack)
        self._idle_threads = idle_threads
        self.admission = Admission(limit)
        self._queue = JobQueue(self.admission)
        self._times = (
            VirtualTimes()
        )  # of small jobs: the event loop and the device are two resources
        self._small_jobs = Lane(self._times)
        self.failed = asyncio.Event()
        budget = MemoryBudget(batch_bytes)
        self.batch_runner = BatchRunner(
            device,
            stack,
            threads,
            budget,
            verifier=verifier or BatchVerifier(),
            launch=launch,
            idle_threads=self._threads_to_lend,
            on_fatal=self._fail_permanently,
        )
        self._pauses = 0
        self._thread = DeviceThread(
            device,
            self._queue,
            self.batch_runner,
            budget,
            max_batch=max_batch or (GPU_MAX_BATCH if device.is_accelerator else 1),
            has_low_priority=self._has_small_jobs,
            preload=preload,
            on_busy=on_busy,
            on_done=self.admission.throughput.add,
            on_failure=self._fail_permanently,
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the device thread; call it on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start(self._loop)

    async def prepare(self, worker: WorkerState) -> None:
        """Warms up. Then statistics count the jobs, which are clients' only.

        Args:
            worker: this process's part of the shared state.
        """
        # an accelerator begins the first request at once; the others are a batch
        count = 1 + _WARM_UP_BATCH if self.device.is_accelerator else 1
        await warm_up(self._submit_queued, min(count, self.admission.limit.requests))
        self.admission.throughput.reset()  # a first call takes tens of milliseconds more
        self.batch_runner.recorder = worker.recorder
        self.admission.on_change = worker.set_queue
        worker.set_memory(self.memory_usage())

    async def stop(self) -> None:
        """Rejects new jobs, runs those that are queued, and ends the thread."""
        self._thread.close()
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def paused(self, *, small_jobs: bool = True) -> Iterator[None]:
        """Runs no job until it exits; meanwhile jobs are queued, up to the limit.

        A job that runs already ends as usual, and several pauses may overlap. So an operator of an
        engine holds its queue, and a test fills it.

        Args:
            small_jobs: queue small jobs as the others are; else they run on the event loop.
        """
        self._add_pause(1, small_jobs)
        try:
            yield
        finally:
            self._add_pause(-1, small_jobs)

    def _add_pause(self, count: int, small_jobs: bool) -> None:
        self._pauses += count if small_jobs else 0
        self._thread.add_pauses(count)

    @property
    def is_alive(self) -> bool:
        """True while the device thread runs."""
        return self._thread.is_alive

    @property
    def is_ready(self) -> bool:
        """True while the engine accepts jobs."""
        # `is_alive` takes a lock; the device thread ends only if the engine stops or fails
        return self._loop is not None and not self._thread.is_closing and not self.failed.is_set()

    @property
    def queued(self) -> Load:
        """The load of all queued jobs."""
        return self.admission.jobs.total

    def memory_usage(self) -> MemoryUsage:
        """Returns this process's use of the device's memory."""
        return self.device.memory_usage()

    @property
    def unfinished_flops(self) -> int:
        """Floating-point operations of the jobs that are queued or run, without small ones."""
        return self.queued.flops + self._thread.running_flops

    @property
    def flops_per_s(self) -> float | None:
        """Operations in a second of the last long batches; None if none has run."""
        return self.admission.throughput.flops_per_s

    def submit(
        self,
        job: Job,
        *,
        tenant: Tenant = ANYONE,
        priority: int = DEFAULT_PRIORITY,
        wait_s: float | None = None,
    ) -> asyncio.Future[Result]:
        """Queues a job; the future is resolved with its result. Cancelling the future removes it.

        Args:
            job: the job to run; none that waits or runs.
            tenant: whose job it is; the jobs of several take turns.
            priority: 1 is high, 3 is low; any other value is the default, 2. Small jobs have none.
            wait_s: seconds that it may be queued; then the future fails with DeadlineExceeded.

        Raises:
            ServiceUnavailable: too much is queued already, or the engine is stopping.
            TooManyRequests: too much of its tenant is, and others have jobs too.
            DeadlineExceeded: its deadline has passed already.
        """
        assert self._loop is not None
        future: asyncio.Future[Result] = self._loop.create_future()
        job.start_wait(future, tenant, priority, wait_s)
        if job.plan.is_small and self._runs_small_jobs:
            # behind those of this turn of the event loop, which run in a row: they take less time
            # so, because torch's code and tables stay in the CPU's caches
            if not self._small_jobs:
                self._loop.call_soon(self._run_turn)
            self._put_small(job)
        else:
            self._put_queued(job)
        return future

    @property
    def _runs_small_jobs(self) -> bool:
        """True while small jobs run on the event loop."""
        return self._has_small_jobs and not self._pauses and self.is_ready

    def _submit_queued(self, job: Job) -> asyncio.Future[Result]:
        """Queues a job for the device thread, also a small one."""
        assert self._loop is not None
        future: asyncio.Future[Result] = self._loop.create_future()
        job.start_wait(future, ANYONE)
        self._put_queued(job)
        return future

    def _put_queued(self, job: Job) -> None:
        """Puts a job into the queue of the device thread; errors as for `submit`."""
        for _, error in self._put_all([job]):
            raise error
        job.future.add_done_callback(partial(self._on_done, job))

    def submit_all(self, jobs: Sequence[Job]) -> None:
        """Queues jobs whose wait has started, of one turn: the device thread wakes up once.

        Each is resolved with its result, or with the error that `submit` raises. Small jobs run
        before this returns, unless others wait for their turn; where batches can form they are
        queued too, so that those of several workers run together.
        """
        small: list[Job] = []
        if self._thread.max_batch == 1 and self._runs_small_jobs:
            small = [job for job in jobs if job.plan.is_small]
            jobs = [job for job in jobs if not job.plan.is_small]
        if jobs:
            for job, error in self._put_all(jobs):
                job.resolve(error)
        if small:
            # a further turn of the event loop would wait for the other threads of this process
            is_first = not self._small_jobs
            for job in small:
                self._put_small(job)
            if is_first:
                self._run_turn()

    def _put_all(self, jobs: Sequence[Job]) -> list[tuple[Job, QkvError]]:
        """Puts jobs into the queue of the device thread; returns those that cannot be queued."""
        assert self._loop is not None
        failed = []
        with self._thread.changed:
            for job in jobs:
                if (error := self._put(job)) is not None:
                    failed.append((job, error))
            self._thread.changed.notify()
        refused = {job for job, _ in failed}
        for job in jobs:
            if job.deadline is not None and job not in refused:
                remaining_s = max(0.0, job.deadline - time.perf_counter())
                job.timer = self._loop.call_later(remaining_s, self._on_deadline, job)
        return failed

    def _put(self, job: Job) -> QkvError | None:
        """Puts a job into the queue, whose lock is held; returns an error if that is impossible."""
        if job.is_expired:
            return self.batch_runner.expire(job)
        if not self.is_ready:
            return self._unavailable_error()
        if (error := self.admission.refusal(job.tenant, job.plan.load)) is None:
            self._queue.put(job)
        return error

    def _put_small(self, job: Job) -> None:
        """Puts a job behind the small ones that wait."""
        if job.tenant not in self._small_jobs:
            self._times.join(job.tenant)
        self._small_jobs.put(job)

    def _run_turn(self) -> None:
        """Runs the small jobs of one tenant that waits alone, or a few while several wait."""
        for job in self._small_jobs.take_turn(_COMPETING_JOBS):
            self._run_small(job)
        if self._small_jobs:
            assert self._loop is not None
            self._loop.call_soon(self._run_turn)

    def _run_small(self, job: Job) -> None:
        outcome: Result | BaseException
        if job.is_cancelled:
            return
        if job.is_expired:
            outcome = self.batch_runner.expire(job)
        else:
            try:
                (outcome,) = self.batch_runner.run([job])
            except BaseException as error:  # a bug; its client must not wait for ever
                outcome = error
        job.resolve(outcome)

    def _on_done(self, job: Job, future: asyncio.Future[Result]) -> None:
        """Removes a job from the queue if its future is cancelled."""
        if future.cancelled():
            self.remove(job)

    def _on_deadline(self, job: Job) -> None:
        """Fails the job if it is still queued; a running job gets its result."""
        if self.remove(job) and not job.is_cancelled:
            job.resolve(self.batch_runner.expire(job))

    def _unavailable_error(self) -> EngineStopped:
        if self.failed.is_set():
            return EngineStopped("the device has failed", retry_after=DEVICE_RETRY_AFTER_S)
        error = stopping()
        return EngineStopped(str(error), retry_after=error.retry_after)

    def remove(self, job: Job) -> bool:
        """Removes a job from the queue; returns False if it is not queued any more."""
        if job.timer is not None:
            job.timer.cancel()
        with self._thread.changed:
            return self._queue.remove(job)

    def _threads_to_lend(self, job: Job) -> int:
        """Returns the number of CPU threads that a job may use: more than one if it is alone."""
        is_alone = not job.plan.is_small and not self.queued.bytes
        return self._idle_threads() if is_alone else 1

    def _fail_permanently(self, error: QkvError) -> None:
        """Fails all queued jobs and sets `failed`; the supervisor then replaces the process."""
        with self._thread.changed:
            removed = self._queue.clear()
        self._thread.resolve([(job, error) for job in removed])
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: the process ends already
            self._loop.call_soon_threadsafe(self.failed.set)
