"""Messages between workers and device processes. No tensor is in one.

`Channel` sends each as its type and its parts. A worker sends the jobs of one turn of its event
loop in one message, and the device process sends the results of one turn in one message.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Self

from qkv.jobs.result import Result
from qkv.telemetry.times import Times


class MessageType(IntEnum):
    """The type of a message; its parts are in parentheses."""

    RUN = 1  # from the worker: run jobs (`JobRequest`s)
    CANCEL = 2  # from the worker: it does not wait for a job any more, but for its answer (id)
    READY = 3  # from the device process: it accepts jobs (name of its device)
    RESULTS = 4  # from the device process: the outputs of jobs are in memory (`JobResult`s)
    ERROR = (
        5  # from the device process: a job failed (id, status, problem, Retry-After, is stopped)
    )
    UNKNOWN_PLAN = 6  # from the device process: it does not have the plan of a job any more (id)


class JobRequest(NamedTuple):
    """A request to run a job.

    Attributes:
        id: the worker's number for it.
        plan: the key of its plan's description.
        plan_content: of the description; None: the device process has got it.
        inputs_offset: offset of its tensors in the worker's region.
        outputs_offset: offset of the memory for its outputs.
        priority: one of `job.PRIORITIES`.
        submitted_at: time of submission, by `time.perf_counter`, one clock for all processes.
        deadline: time at which it expires, by the same clock; None: never.
        tenant: the name of its tenant.
        weight: of the tenant.
    """

    id: int
    plan: bytes
    plan_content: bytes | None
    inputs_offset: int
    outputs_offset: int
    priority: int
    submitted_at: float
    deadline: float | None
    tenant: str
    weight: float


class JobResult(NamedTuple):
    """What was measured of a job.

    Attributes:
        id: the worker's number for it.
        times: seconds of loading, computing, splitting, queueing, and in total.
        backend, batch_size, notes, peak_bytes: as those of `Result`.
    """

    id: int
    times: tuple[float, float, float, float, float]
    backend: str
    batch_size: int
    notes: tuple[str, ...]
    peak_bytes: int

    @classmethod
    def of(cls, id: int, result: Result) -> Self:
        """Returns what was measured of the job with this number."""
        t = result.times
        times = t.load_s, t.compute_s, t.split_s, t.queue_s, t.total_s
        return cls(id, times, result.backend, result.batch_size, result.notes, result.peak_bytes)

    def result(self, device: str) -> Result:
        """Returns the result without outputs; `device` is the name of the device that ran it."""
        return Result(
            {},
            Times(*self.times),
            self.backend,
            self.batch_size,
            device=device,
            notes=self.notes,
            peak_bytes=self.peak_bytes,
        )
