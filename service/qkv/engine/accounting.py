"""Turns job outputs into results with timing, and records statistics per model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qkv.engine.executor import JobOutput
from qkv.engine.work_queue import JobResult, QueuedJob
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

    def record_failure(self, queued_job: QueuedJob) -> None:
        """Records a queued job that failed or expired."""
        if self.stats_recorder is not None and queued_job.job.is_inference:
            name = queued_job.job.variant.name
            total_s = time.perf_counter() - queued_job.enqueued_at
            self.stats_recorder.record_failure(name, total_s)

    def record_batch(
        self, job: Job, enqueued_at: Sequence[float], outputs: Sequence[JobOutput]
    ) -> None:
        """Records a batch.

        Args:
            job: one of its jobs.
            enqueued_at: submission time of each job, by `time.perf_counter`.
            outputs: output of each job, in the same order.
        """
        if self.stats_recorder is None or not job.is_inference:
            return  # model statistics count inference requests only
        now = time.perf_counter()
        total_s, queue_s = sum(now - at for at in enqueued_at), 0.0
        batch_s, shared_s = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for at, output in zip(enqueued_at, outputs, strict=True):
            queue_s += output.started_at - at
            for i, seconds in enumerate((output.load_s, output.compute_s, output.split_s)):
                # the jobs of a stacked call share its seconds, which count once for the batch
                batch_s[i] += seconds / output.stacked_count
                shared_s[i] += seconds - seconds / output.stacked_count
        self.stats_recorder.record_batch(
            job.variant.name, len(outputs), total_s, queue_s, batch_s, shared_s
        )

    def to_result(self, job: Job, enqueued_at: float, output: JobOutput) -> JobResult:
        """Returns the result of a job that was submitted at `enqueued_at`."""
        return JobResult(
            output.outputs,
            {
                "queue_ms": (output.started_at - enqueued_at) * 1e3,
                "transfer_ms": (output.load_s + output.split_s) * 1e3,
                "compute_ms": output.compute_s * 1e3,
                "total_ms": (time.perf_counter() - enqueued_at) * 1e3,
                "batch_size": output.batch_size,
                "device": self._device,
                "backend": output.backend,
                "flops": job.flops,
                "bytes": job.bytes_in + job.bytes_out,
            },
        )
