"""Runs batches on the device: halves a batch that fails, and classifies the errors.

The engine calls `begin` and `finish` for batches of its queue, and `run` for small jobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.device import Device
from qkv.engine.device_errors import (
    EngineStopped,
    MemoryBudget,
    release_memory,
    to_client_error,
)
from qkv.engine.executor import Launched, launch
from qkv.errors import DeadlineExceeded, QkvError
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.telemetry.counters import Recorder

_log = logging.getLogger("qkv.engine")

DEVICE_RETRY_AFTER_S: Final = 5
"""Seconds after which a client may try again if the device has failed: a new process needs less."""

Launch = Callable[[Sequence[Job], Device, bool, int, int], Launched]
"""Begins a batch, as `executor.launch` does."""


class BatchRunner:
    """A runner of batches of jobs with equal batch keys.

    The device thread calls it and, for small jobs on a CPU, the event loop. Both change the budget;
    an update that is lost does no harm.

    Args:
        device: runs the jobs.
        stack: True runs a batch as one call (see `executor.launch`).
        threads: CPU threads of one call.
        budget: lowered if memory runs out.
        verifier: checks the bits of stacked batches.
        launch: begins a batch.
        idle_threads: returns the number of CPU threads that a job may borrow.
        on_fatal: called if the device can run nothing more.

    Attributes:
        device_name: as responses give it.
        launch: as the argument; tests may replace it while the engine runs.
        recorder: records statistics of each model; None until recording starts.
    """

    def __init__(
        self,
        device: Device,
        stack: bool,
        threads: int,
        budget: MemoryBudget,
        *,
        verifier: BatchVerifier,
        launch: Launch = launch,
        idle_threads: Callable[[Job], int] = lambda _: 1,
        on_fatal: Callable[[QkvError], None] = lambda _: None,
    ) -> None:
        self._device, self._stack, self._threads = device, stack, threads
        self.device_name = str(device.torch_device)
        self._budget, self._verifier = budget, verifier
        self.launch = launch
        self.recorder: Recorder | None = None
        self._idle_threads, self._on_fatal = idle_threads, on_fatal

    def begin(self, jobs: Sequence[Job]) -> Launched:
        """Begins to run jobs; the result raises their error."""
        try:
            if self._stack and not self._verifier.may_stack(jobs):
                return partial(self._each_alone, jobs)
            idle_threads = self._idle_threads(jobs[0])
            launched = self.launch(jobs, self._device, self._stack, self._threads, idle_threads)
        except BaseException as error:  # a variant's SystemExit ends neither thread nor loop
            return partial(_raise, error)
        return partial(self._verified, jobs, launched) if self._stack else launched

    def run(self, jobs: Sequence[Job]) -> list[Result | QkvError]:
        """Runs at least one job; returns the result or the error of each."""
        return self.finish(self.begin(jobs), jobs)

    def finish(self, launched: Launched, jobs: Sequence[Job]) -> list[Result | QkvError]:
        """Returns the results of jobs that have begun; halves a failing batch until the culprit
        fails alone.

        Args:
            launched: as `begin` returned it.
            jobs: at least one.
        """
        batch_bytes = sum([job.plan.bytes for job in jobs])
        try:
            results = launched()
        except BaseException as error:
            cause = error
        else:
            self._budget.recover(batch_bytes)
            self._complete(jobs, results)
            return [*results]
        if self._device.is_fatal(cause):
            _log.critical("the device has failed; this process ends", exc_info=cause)
            failed = EngineStopped("the device has failed", retry_after=DEVICE_RETRY_AFTER_S)
            self._on_fatal(failed)
            return [failed for _ in jobs]
        if self._device.is_out_of_memory(cause):
            self._budget.lower(batch_bytes)
            release_memory(cause, self._device)
        if len(jobs) > 1:
            middle = len(jobs) // 2
            halves = (slice(middle), slice(middle, None))
            return [r for half in halves for r in self.run(jobs[half])]
        _log.error("a job of %s failed", jobs[0].plan.variant.name, exc_info=cause)
        self.record_failure(jobs[0])
        return [to_client_error(cause, self._device)]

    def record_failure(self, job: Job) -> None:
        """Records a job that failed."""
        if self.recorder is not None and job.plan.is_inference:
            total_s = time.perf_counter() - job.submitted_at
            for name in job.plan.derived(_model_names):
                self.recorder.record_failure(name, total_s)

    def expire(self, job: Job) -> DeadlineExceeded:
        """Records a job whose deadline has passed; returns its error."""
        assert job.deadline is not None
        self.record_failure(job)
        wait_ms = (job.deadline - job.submitted_at) * 1e3
        return DeadlineExceeded(
            f"the request waited {wait_ms:g} ms in the queue, its deadline passed"
        )

    def _complete(self, jobs: Sequence[Job], results: Sequence[Result]) -> None:
        """Adds what the jobs know to the results of a batch, and records it."""
        now, device = time.perf_counter(), self.device_name
        every = []
        for job, result in zip(jobs, results, strict=True):
            times, at = result.times, job.submitted_at
            times.queue_s, times.total_s = result.started_at - at, now - at
            result.device = device
            every.append(times)
        plan = jobs[0].plan
        if self.recorder is not None and plan.is_inference:
            for name in plan.derived(_model_names):
                self.recorder.record_batch(name, every)

    def _verified(self, jobs: Sequence[Job], launched: Launched) -> list[Result]:
        """Returns the outputs of a batch; those of each job alone if a check finds other bits."""
        outputs = launched()
        try:
            is_same = self._verifier.has_same_bits(jobs, outputs, self._run_alone)
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            return outputs  # without a check: the batch has taken the memory
        return outputs if is_same else self._each_alone(jobs)

    def _each_alone(self, jobs: Sequence[Job]) -> list[Result]:
        results = [self._run_alone(job) for job in jobs]
        for result in results:
            result.batch_size = len(jobs)
        return results

    def _run_alone(self, job: Job) -> Result:
        (output,) = self.launch([job], self._device, self._stack, self._threads, 1)()
        return output


def _model_names(plan: Plan) -> list[str]:
    """Returns the names under which statistics count a run: of the variant, and of a loaded
    layer."""
    name = plan.layer_name
    return [plan.variant.name, *([] if name is None else [name])]


def _raise(error: BaseException) -> NoReturn:
    raise error
