"""Completes the results of jobs, and records statistics of each model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qkv.engine.result import Result
from qkv.jobs.job import Job
from qkv.telemetry.model_stats import ModelStatsRecorder

__all__ = ["JobAccounting"]


class JobAccounting:
    """Results and statistics of the jobs of one engine; safe across its threads.

    Args:
        device: name of the device, as responses give it.

    Attributes:
        stats_recorder: records the statistics; None until recording starts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.stats_recorder: ModelStatsRecorder | None = None

    def record_failure(self, job: Job, enqueued_at: float) -> None:
        """Records a job that failed or expired; it was submitted at `enqueued_at`."""
        if self.stats_recorder is not None and job.plan.is_inference:
            total_s = time.perf_counter() - enqueued_at
            for name in job.plan.model_names:
                self.stats_recorder.record_failure(name, total_s)

    def record_batch(
        self, jobs: Sequence[Job], enqueued_at: Sequence[float], results: Sequence[Result]
    ) -> None:
        """Records a batch, and completes the results of its jobs.

        Args:
            jobs: its jobs.
            enqueued_at: submission time of each job, by `time.perf_counter`.
            results: of each job, in the same order.
        """
        now = time.perf_counter()
        for at, result in zip(enqueued_at, results, strict=True):
            times = result.times
            times.queue_s, times.total_s = result.started_at - at, now - at
            result.device = self._device
        # model statistics count inference requests only
        if self.stats_recorder is not None and jobs[0].plan.is_inference:
            times_of_each = [result.times for result in results]
            for name in jobs[0].plan.model_names:
                self.stats_recorder.record_batch(name, times_of_each)
