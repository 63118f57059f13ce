"""A worker's job in the device process, from its request until its result is sent."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from qkv.engine.remote.job_memory import read_inputs
from qkv.engine.remote.messages import NO_DEADLINE, JobRequest
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result

__all__ = ["WorkerJob"]


class ResultSender(Protocol):
    """The way of results to the worker of a job."""

    def send_result(self, job: WorkerJob, result: Result) -> None:
        """Sends the result of a job."""

    def send_error(self, id: int, error: BaseException) -> None:
        """Sends the error of the job with the worker's number for it."""


class WorkerJob(Job):
    """A job that is answered through the link to its worker instead of a future.

    Args:
        link: sends its result.
        request: the received request.
        plan: its plan.
        inputs: bytes of its tensors; the job refers to them as long as the device may read them.

    Attributes:
        id: the worker's number for it.
        outputs_offset: offset of the memory for its outputs.
        inputs: as the argument.
        is_done: it has a result or an error, or is cancelled.
    """

    __slots__ = ("_is_cancelled", "_link", "id", "inputs", "is_done", "outputs_offset")

    def __init__(
        self, link: ResultSender, request: JobRequest, plan: Plan, inputs: np.ndarray
    ) -> None:
        super().__init__(plan, *read_inputs(plan, inputs))
        self._link, self.inputs = link, inputs
        self.id, self.outputs_offset = request.id, request.outputs_offset
        self.tenant, self.priority = request.tenant, request.priority
        self.submitted_at, self.timer = request.submitted_at, None
        self.deadline = None if request.deadline == NO_DEADLINE else request.deadline
        self.is_done = self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """True if the worker does not wait for it any more."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Drops the result that it may still get."""
        self.is_done = self._is_cancelled = True

    def resolve(self, outcome: Result | BaseException) -> None:
        """Sends its result or its error, unless it is cancelled."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None  # which refers to this object
        if self.is_done:
            return
        self.is_done = True
        if isinstance(outcome, Result):
            self._link.send_result(self, outcome)
        else:
            self._link.send_error(self.id, outcome)
