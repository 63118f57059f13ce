"""What becomes of jobs: the answers that are made of their runs, and the counts of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from qkv.engine.executor import Ran
from qkv.engine.work_queue import Answer, Waiting
from qkv.jobs.job import Job
from qkv.telemetry.model_stats import Recorder

__all__ = ["Alone", "Ledger"]


class Alone(NamedTuple):
    """A job that ran by itself, not answered yet."""

    ledger: Ledger
    job: Job
    ran: Ran
    total_s: float

    def answer(self) -> Answer:
        """Its answer."""
        return self.ledger.answer(self.job, self.ran.started, self.ran)

    def record(self) -> None:
        """Counts it, once."""
        self.ledger.ran_alone(self.job, self.ran, self.total_s)


class Ledger:
    """Counts what one engine does; safe across its threads.

    Args:
        device: the name of where it runs.

    Attributes:
        recorder: what it counts with, once there is something.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.recorder: Recorder | None = None

    def failed(self, waiting: Waiting) -> None:
        """A job was queued and has no answer: it failed, or its time was up."""
        if self.recorder is not None and waiting.job.is_inference:
            name = waiting.job.variant.name
            self.recorder.failed(name, time.perf_counter() - waiting.since)

    def ran(self, job: Job, since: Sequence[float], ran: Sequence[Ran]) -> None:
        """Jobs ran together.

        Args:
            job: one of them.
            since: when each came, by `time.perf_counter`.
            ran: what came of them, in the same order.
        """
        if self.recorder is None or not job.is_inference:
            return  # it counts inferences
        now = time.perf_counter()
        total, queue = sum(now - s for s in since), 0.0
        together, shared = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for came, r in zip(since, ran, strict=True):
            queue += r.started - came
            for i, seconds in enumerate((r.load_s, r.compute_s, r.split_s)):
                # those that shared a call share its seconds: they count once for the batch
                together[i] += seconds / r.stacked
                shared[i] += seconds - seconds / r.stacked
        self.recorder.ran(job.variant.name, len(ran), total, queue, together, shared)

    def ran_alone(self, job: Job, ran: Ran, total_s: float) -> None:
        """A job ran as soon as it was there, and took so long."""
        if self.recorder is not None and job.is_inference:
            times = ran.load_s, ran.compute_s, ran.split_s
            self.recorder.ran(job.variant.name, 1, total_s, 0.0, times)

    def answer(self, job: Job, since: float, ran: Ran) -> Answer:
        """The answer to a job that came at `since`."""
        return Answer(
            ran.outputs,
            {
                "queue_ms": (ran.started - since) * 1e3,
                "transfer_ms": (ran.load_s + ran.split_s) * 1e3,
                "compute_ms": ran.compute_s * 1e3,
                "total_ms": (time.perf_counter() - since) * 1e3,
                "batch_size": ran.batch_size,
                "device": self._device,
                "backend": ran.backend,
                "flops": job.flops,
                "bytes": job.bytes_in + job.bytes_out,
            },
        )
