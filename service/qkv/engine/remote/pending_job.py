"""A worker's job in the device process, from its request until its result is sent."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from qkv.engine.remote.messages import JobRequest
from qkv.engine.result import Result
from qkv.engine.work_queue import QueuedJob
from qkv.errors import QkvError
from qkv.jobs.plan import Plan

__all__ = ["PendingJob"]


class ResultSender(Protocol):
    """The way of results to the worker of a job."""

    def send_result(self, pending: PendingJob, result: Result) -> None:
        """Sends the result of a job."""

    def send_error(self, id: int, error: Exception) -> None:
        """Sends the error of the job with the worker's number for it."""


class PendingJob:
    """A worker's job without a result: a `ResultReceiver`.

    Args:
        link: sends its result.
        request: the received request.
        plan: its plan.
        inputs: bytes of its tensors; the job refers to them as long as the device may read them.

    Attributes:
        request, plan, inputs: as the arguments.
        queued_job: its place in the engine's queue, until it is done.
    """

    __slots__ = ("_is_cancelled", "_is_done", "_link", "inputs", "plan", "queued_job", "request")

    def __init__(
        self, link: ResultSender, request: JobRequest, plan: Plan, inputs: np.ndarray
    ) -> None:
        self._link, self.request, self.plan, self.inputs = link, request, plan, inputs
        self.queued_job: QueuedJob | None = None
        self._is_done = self._is_cancelled = False

    def done(self) -> bool:
        """Returns True if it has a result or an error, or is cancelled."""
        return self._is_done

    def cancelled(self) -> bool:
        """Returns True if the worker does not wait for it any more."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Drops the result that it may still get."""
        self._is_done = self._is_cancelled = True
        self.queued_job = None  # which refers to this object

    def set_result(self, result: Result, /) -> None:
        """Sends the result."""
        self._is_done, self.queued_job = True, None
        self._link.send_result(self, result)

    def set_exception(self, error: QkvError, /) -> None:
        """Sends the error."""
        self._is_done, self.queued_job = True, None
        self._link.send_error(self.request.id, error)
