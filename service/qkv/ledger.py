"""What becomes of jobs: the answers that are made of their runs, and the counts of both."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qkv.job import Job
from qkv.models import Recorder
from qkv.queue import Answer, Waiting
from qkv.run import Ran

__all__ = ["Ledger"]


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

    def ran(self, batch: Sequence[tuple[Job, float]], ran: Sequence[Ran]) -> list[Answer]:
        """Jobs ran together.

        Args:
            batch: each with when it came, by `time.perf_counter`.
            ran: what came of them, in the same order.
        """
        self._count(batch, ran)
        return [self._answer(job, since, r) for (job, since), r in zip(batch, ran, strict=True)]

    def failed(self, waiting: Waiting) -> None:
        """A job was queued and has no answer: it failed, or its time was up."""
        if self.recorder is not None and waiting.job.is_inference:
            name = waiting.job.variant.name
            self.recorder.failed(name, time.perf_counter() - waiting.since)

    def _count(self, batch: Sequence[tuple[Job, float]], ran: Sequence[Ran]) -> None:
        job = batch[0][0]
        if self.recorder is None or not job.is_inference:
            return  # it counts inferences
        now, load, compute, split = time.perf_counter(), 0.0, 0.0, 0.0
        requests = []
        for (_, since), r in zip(batch, ran, strict=True):
            # those that shared a call share its seconds: they count once for the batch
            load += r.load_s / r.stacked
            compute += r.compute_s / r.stacked
            split += r.split_s / r.stacked
            requests.append((now - since, r.started - since, r.load_s, r.compute_s, r.split_s))
        self.recorder.ran(job.variant.name, requests, (load, compute, split))

    def _answer(self, job: Job, since: float, ran: Ran) -> Answer:
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
