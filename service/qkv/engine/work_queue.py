"""Bounded work queue: jobs grouped by batch key, served in turn within each priority.

The jobs of one tenant are served oldest first, those of several tenants in `FairOrder`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from qkv.engine.fair_order import FairOrder
from qkv.engine.load import Backlog, Load
from qkv.engine.result import Result
from qkv.engine.shared_limit import SharedLimit
from qkv.engine.tenant import ANYONE, Tenant
from qkv.errors import QkvError
from qkv.jobs.job import Job

__all__ = [
    "DEFAULT_PRIORITY",
    "PRIORITIES",
    "QueuedJob",
    "ResultReceiver",
    "ThroughputEstimate",
    "WorkQueue",
]

PRIORITIES: Final = (1, 2, 3)
"""High, default and low priority."""
DEFAULT_PRIORITY: Final = 2

_DECAY: Final = 0.9  # of the weight of a batch in the estimate, with each later batch
_MAX_RETRY_AFTER_S: Final = 60  # longer estimates are not reliable
_LONG_BATCH_S: Final = 0.01  # the time of a shorter one is mostly independent of its operations


class ThroughputEstimate:
    """An estimate of the work done in a second, from the last batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all batches."""
        self._done, self._seconds = [0.0, 0.0, 0.0], 0.0
        self._long_flops, self._long_seconds = 0.0, 0.0

    def add(self, done: Load, seconds: float) -> None:
        """Adds the work and the seconds of a batch."""
        self._done = [_DECAY * was + more for was, more in zip(self._done, done, strict=True)]
        self._seconds = _DECAY * self._seconds + seconds
        if seconds >= _LONG_BATCH_S:
            # the event loop reads them meanwhile, so the divisor is first
            self._long_seconds = _DECAY * self._long_seconds + seconds
            self._long_flops = _DECAY * self._long_flops + done.flops

    @property
    def flops_per_s(self) -> float | None:
        """Operations in a second of the last batches of at least 10 ms; None: there was none."""
        return self._long_flops / self._long_seconds if self._long_flops else None

    def retry_after(self, queued: Load) -> int:
        """Estimates the whole seconds, from 1 to 60, until the queued load is done."""
        done, seconds = self._done, self._seconds
        each = (w * seconds / d for w, d in zip(queued, done, strict=True) if d)
        seconds = round(max(each, default=0.0), 3)  # so that a rounding error adds no second
        return max(1, min(math.ceil(seconds), _MAX_RETRY_AFTER_S))


class ResultReceiver(Protocol):
    """The part of a future that the engine uses; the event loop calls the methods `set_...`."""

    def done(self) -> bool:
        """Returns True if it has a result or an error, or is cancelled."""

    def cancelled(self) -> bool:
        """Returns True if nothing waits for the result any more."""

    def set_result(self, result: Result, /) -> None:
        """Receives the result."""

    def set_exception(self, error: QkvError, /) -> None:
        """Receives the error."""


@dataclass(slots=True, eq=False)
class QueuedJob:
    """A job in the queue, and the receiver of its result.

    Attributes:
        job: the job to run.
        future: receives the result or an error; an `asyncio.Future`, or an object like it.
        priority: one of `PRIORITIES`; any other value becomes the default.
        enqueued_at: time of submission, by `time.perf_counter`.
        deadline: time at which it expires, by the same clock; None: never.
        tenant: whose job it is.
        timer: the timer of its deadline, set once it is queued.
        batch_key: jobs with equal keys may run together.
        load: the work of the job.
    """

    job: Job
    future: ResultReceiver
    priority: int = DEFAULT_PRIORITY
    enqueued_at: float = field(default_factory=time.perf_counter)
    deadline: float | None = None
    tenant: Tenant = ANYONE
    timer: asyncio.TimerHandle | None = None
    batch_key: Hashable = field(init=False)
    load: Load = field(init=False)

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            self.priority = DEFAULT_PRIORITY
        self.batch_key = self.priority, self.job.batch_key
        self.load = Load(1, self.job.plan.bytes, self.job.plan.flops)

    @property
    def is_expired(self) -> bool:
        """True once its deadline has passed."""
        return self.deadline is not None and self.deadline <= time.perf_counter()


_Lines = dict[Tenant, OrderedDict[QueuedJob, None]]
"""The jobs of each tenant that has some, oldest first."""


class WorkQueue:
    """Bounded queue of jobs, by batch key; not safe across threads: the engine holds a lock.

    Args:
        limit: the most load that may be queued.

    Attributes:
        throughput: estimate from the batches that ran; the engine adds them.
        shared_limit: the argument, and the shares of tenants in it.
        queued: the load of all queued jobs.
        on_change: called with the sum of that load when it changes.
    """

    def __init__(self, limit: Load) -> None:
        self.throughput = ThroughputEstimate()
        self.shared_limit = SharedLimit(limit, self.throughput.retry_after)
        self.queued = Backlog()
        self.on_change: Callable[[Load], None] = lambda _: None
        self._fair_order = FairOrder()
        self._groups: dict[Hashable, _Lines] = {}
        self._orders: dict[int, _Lines] = {priority: {} for priority in PRIORITIES}

    def __len__(self) -> int:
        return sum([len(line) for lines in self._orders.values() for line in lines.values()])

    def put(self, queued_job: QueuedJob) -> None:
        """Adds a job.

        Raises:
            ServiceUnavailable: too much is queued already.
            TooManyRequests: so much of its tenant is queued already, and others use the queue.
        """
        tenant, load = queued_job.tenant, queued_job.load
        if (error := self.shared_limit.refusal(tenant, load, self.queued)) is not None:
            raise error
        if tenant not in self.queued:
            self._fair_order.join(tenant)
        for lines in self._lines_of(queued_job):
            lines.setdefault(tenant, OrderedDict())[queued_job] = None
        self.queued.add(tenant, load)
        self.on_change(self.queued.total)

    def remove(self, queued_job: QueuedJob) -> bool:
        """Removes a job; returns False if it is not queued any more."""
        line = self._orders[queued_job.priority].get(queued_job.tenant, ())
        if queued_job not in line:
            return False
        self._discard(queued_job)
        self.on_change(self.queued.total)
        return True

    def clear(self) -> list[QueuedJob]:
        """Removes and returns all jobs."""
        lines = [line for order in self._orders.values() for line in order.values()]
        removed = [queued_job for line in lines for queued_job in line]
        self._groups.clear()
        for order in self._orders.values():
            order.clear()
        self.queued.clear()
        self.on_change(self.queued.total)
        return removed

    def find_next(self) -> QueuedJob | None:
        """Returns the job of the highest priority that is next; removes cancelled jobs before
        it."""
        for order in self._orders.values():
            while order:
                queued_job = self._first(order)
                if not queued_job.future.cancelled():
                    return queued_job
                self.remove(queued_job)
        return None

    def take_batch(self, first: QueuedJob, max_jobs: int, max_bytes: int) -> list[QueuedJob]:
        """Removes and returns the batch of a job: those with its batch key, of all tenants in turn.

        Args:
            first: as `find_next` returned it.
            max_jobs: limit of jobs in the batch, cancelled jobs not included.
            max_bytes: limit of the bytes of their tensors, beyond the first job.
        """
        self._fair_order.begin(first.tenant)
        group, total = self._groups[first.batch_key], 0
        batch: list[QueuedJob] = []
        while group and len(batch) < max_jobs:
            queued_job = self._first(group)
            total += queued_job.load.bytes
            if batch and total > max_bytes:
                break
            self._discard(queued_job)
            if queued_job is first or not queued_job.future.cancelled():
                batch.append(queued_job)
                self._fair_order.charge(queued_job.tenant, queued_job.load.work)
        self.on_change(self.queued.total)
        return batch

    def _first(self, lines: _Lines) -> QueuedJob:
        """Returns the oldest job of the tenant that is next."""
        tenant = self._fair_order.first(lines)
        return next(iter(lines[tenant]))

    def _lines_of(self, queued_job: QueuedJob) -> tuple[_Lines, _Lines]:
        """Returns the lines of its batch key, and those of its priority."""
        group = self._groups.setdefault(queued_job.batch_key, {})
        return group, self._orders[queued_job.priority]

    def _discard(self, queued_job: QueuedJob) -> None:
        for lines in self._lines_of(queued_job):
            line = lines[queued_job.tenant]
            del line[queued_job]
            if not line:
                del lines[queued_job.tenant]
        if not self._groups[queued_job.batch_key]:
            del self._groups[queued_job.batch_key]
        self.queued.remove(queued_job.tenant, queued_job.load)
