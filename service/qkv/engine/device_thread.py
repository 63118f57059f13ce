"""The thread that owns the device: takes batches from a queue, runs them, and hands over results.

The engine puts jobs into the queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from qkv.attention.layers.layer import Layer
from qkv.engine.batch_runner import BatchRunner
from qkv.engine.device.device import Device
from qkv.engine.device_errors import MemoryBudget
from qkv.engine.executor import Launched
from qkv.engine.lane import JobQueue
from qkv.engine.thread_priority import yield_to_event_loop
from qkv.errors import Internal, QkvError
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.result import Result

_log = logging.getLogger("qkv.engine")


class _BegunBatch(NamedTuple):
    """A batch that the device has begun."""

    jobs: list[Job]
    started_at: float
    launched: Launched


class DeviceThread:
    """The one thread that runs the jobs of a queue on a device.

    Args:
        device: runs the jobs.
        queue: of the jobs; `changed` guards it.
        batch_runner: runs the batches.
        budget: of the bytes of a batch.
        max_batch: limit of jobs in one batch.
        has_low_priority: the event loop runs jobs too, and goes first.
        preload: loaded layers that the device gets before it runs a job.
        on_busy: called with True when a batch starts and with False when it ends.
        on_done: called with the load of a batch, and its seconds.
        on_failure: called with the error of a bug that may have lost jobs.

    Attributes:
        changed: is notified after a job is put into the queue.
        max_batch: as the argument.
        running_flops: floating-point operations of the batches that have begun.
        is_closing: the thread ends once the queue is empty.
    """

    def __init__(
        self,
        device: Device,
        queue: JobQueue,
        batch_runner: BatchRunner,
        budget: MemoryBudget,
        *,
        max_batch: int,
        has_low_priority: bool,
        preload: Sequence[Layer],
        on_busy: Callable[[bool], None],
        on_done: Callable[[Load, float], None],
        on_failure: Callable[[QkvError], None],
    ) -> None:
        self._device, self._queue = device, queue
        self._batch_runner, self._budget = batch_runner, budget
        self.max_batch, self._has_low_priority = max_batch, has_low_priority
        self._preload = preload
        self._on_busy, self._on_done, self._on_failure = on_busy, on_done, on_failure
        self._finished_at = 0.0  # the last batch, by time.perf_counter
        self.running_flops = 0
        self.is_closing = False
        self._pauses = 0
        self.changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="qkv-device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread, which hands results over on an event loop."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """Lets the thread end after the jobs that are queued."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def add_pauses(self, count: int) -> None:
        """Adds to the number of pauses, a negative one too; no batch begins during a pause."""
        with self.changed:
            self._pauses += count
            self.changed.notify()

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def resolve(self, outcomes: Sequence[tuple[Job, Result | QkvError]]) -> None:
        """Hands the results of jobs to the event loop in one call."""

        def set_results() -> None:
            for job, outcome in outcomes:
                job.resolve(outcome)

        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nothing awaits the results
            self._loop.call_soon_threadsafe(set_results)

    def _run(self) -> None:
        self._device.use_in_this_thread()
        self._device.layer_memory.preload(self._preload)
        if self._has_low_priority:
            # the event loop runs small jobs beside a large one, and must not wait for a turn
            yield_to_event_loop()
        begun: _BegunBatch | None = None
        while begun is not None or self._wait_for_job():
            try:
                begun = self._run_ahead(begun)
            except BaseException:  # nothing may end this loop: bugs are logged
                begun = None
                _log.exception("the engine failed")
                self._on_failure(Internal("the engine failed"))

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
        if begun is None or self._device.is_accelerator:
            return begun
        self._finish(begun)
        return None

    def _begin(self, batch: list[Job]) -> _BegunBatch | None:
        """Begins to run the jobs of a batch that have not expired; a busy event loop may not have
        called `_on_deadline` yet. Returns None if there are none."""
        flops = 0
        try:
            expired = [job for job in batch if job.is_expired]
            if expired:
                self.resolve([(job, self._batch_runner.expire(job)) for job in expired])
                batch = [job for job in batch if job not in expired]
            if not batch:
                return None
            self._report_busy(True)
            started_at = time.perf_counter()
            flops = _flops_of(batch)
            self.running_flops += flops
            return _BegunBatch(batch, started_at, self._batch_runner.begin(batch))
        except BaseException:
            _log.exception("the engine failed")
            self.running_flops -= flops
            error = Internal("the engine failed")
            self.resolve([(job, error) for job in batch])
            return None

    def _finish(self, begun: _BegunBatch, is_last: bool = True) -> None:
        """Waits for the results of a batch, and hands them over.

        `is_last`: the device has no other batch.
        """
        batch, started_at, launched = begun
        results: list[Result | QkvError] = [Internal("the engine failed")] * len(batch)
        try:
            results = self._batch_runner.finish(launched, batch)
        except BaseException:
            _log.exception("the engine failed")
        self._report_busy(not is_last)
        self.running_flops -= _flops_of(batch)
        # batches overlap on an accelerator: the time since the previous one is this one's
        now = time.perf_counter()
        started_at = max(started_at, self._finished_at)
        self._finished_at = now
        done = Load.sum([job.plan.load for job in batch])
        self._on_done(done, now - started_at)
        self.resolve(list(zip(batch, results, strict=True)))

    def _report_busy(self, is_busy: bool) -> None:
        try:
            self._on_busy(is_busy)
        except Exception:  # a bug there must not cost a result
            _log.exception("the engine could not report its state")

    def _wait_for_job(self) -> bool:
        """Waits for a job; returns False if the engine is stopping and the queue is empty."""
        with self.changed:
            while self._pauses or self._queue.find_next() is None:
                if self.is_closing and not self._queue:
                    return False
                self.changed.wait()
        return True

    def _take_batch(self) -> list[Job]:
        """Takes the next batch up to the budget, without cancelled jobs; may be empty."""
        with self.changed:
            if self._pauses:
                return []
            return self._queue.take_batch(self.max_batch, self._budget.bytes)


def _flops_of(batch: list[Job]) -> int:
    return sum([job.plan.flops for job in batch])
