"""Turns job outputs into results with timing, and records statistics per model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qkv.engine.executor import JobOutput
from qkv.engine.work_queue import JobResult
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
            self.stats_recorder.record_failure(job.plan.variant.name, total_s)

    def record_batch(
        self, jobs: Sequence[Job], enqueued_at: Sequence[float], outputs: Sequence[JobOutput]
    ) -> list[JobResult]:
        """Records a batch; returns the results of its jobs.

        Args:
            jobs: its jobs.
            enqueued_at: submission time of each job, by `time.perf_counter`.
            outputs: output of each job, in the same order.
        """
        now = time.perf_counter()
        # model statistics count inference requests only
        if self.stats_recorder is not None and jobs[0].plan.is_inference:
            self.stats_recorder.record_batch(jobs[0].plan.variant.name, now, enqueued_at, outputs)
        results = []
        for job, at, output in zip(jobs, enqueued_at, outputs, strict=True):
            timing = {
                "queue_ms": (output.started_at - at) * 1e3,
                "transfer_ms": (output.load_s + output.split_s) * 1e3,
                "compute_ms": output.compute_s * 1e3,
                "total_ms": (now - at) * 1e3,
                "batch_size": output.batch_size,
                "device": self._device,
                "backend": output.backend,
                "flops": job.plan.flops,
                "bytes": job.plan.bytes,
            }
            results.append(JobResult(output.outputs, timing))
        return results
