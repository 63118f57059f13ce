"""The times of a job, which its response, the metrics, the log and the span give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Times:
    """The times of the stages of a job, in seconds, or their sums over several jobs.

    Attributes:
        load_s: aligning the tensors and moving them to the device.
        compute_s: projections and variant; on a GPU between two events.
        split_s: moving the outputs back and splitting them.
        queue_s: from its submission to the start of its batch.
        total_s: from its submission to its result, or from the last byte of the request.
        stacked_count: number of jobs in the same call of a variant, which share the seconds of
            loading, computing and splitting.
    """

    load_s: float = 0.0
    compute_s: float = 0.0
    split_s: float = 0.0
    queue_s: float = 0.0
    total_s: float = 0.0
    stacked_count: int = 1

    @property
    def transfer_s(self) -> float:
        """Seconds of moving tensors to the device and back, as responses give them."""
        return self.load_s + self.split_s

    @property
    def own_compute_s(self) -> float:
        """Seconds of computation, divided by the jobs of the call."""
        return self.compute_s / self.stacked_count

    def add(self, other: Times) -> None:
        """Adds the times of another job, but those of the whole request."""
        self.load_s += other.load_s
        self.compute_s += other.compute_s
        self.split_s += other.split_s
        self.queue_s += other.queue_s
