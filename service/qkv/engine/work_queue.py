"""Bounded work queue: jobs grouped by batch key, served oldest first within each priority."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from qkv.engine.result import Result
from qkv.errors import QkvError, ServiceUnavailable
from qkv.jobs.job import Job

__all__ = [
    "DEFAULT_PRIORITY",
    "PRIORITIES",
    "Load",
    "QueuedJob",
    "ResultReceiver",
    "ThroughputEstimate",
    "WorkQueue",
]

PRIORITIES: Final = (1, 2, 3)
"""High, default and low priority."""
DEFAULT_PRIORITY: Final = 2

_UNITS: Final = ("requests", "bytes of tensors", "floating-point operations")
_DECAY: Final = 0.9  # of the weight of a batch in the estimate, with each later batch
_MAX_RETRY_AFTER_S: Final = 60  # longer estimates are not reliable
_LONG_BATCH_S: Final = 0.01  # the time of a shorter one is mostly independent of its operations


class Load(NamedTuple):
    """An amount of work: queued, being received, or done.

    Attributes:
        requests: number of requests.
        bytes: bytes of their tensors, in and out.
        flops: floating-point operations of their matrix products.
    """

    requests: int = 0
    bytes: int = 0
    flops: int = 0

    @classmethod
    def of(cls, queued_jobs: Iterable[QueuedJob]) -> Load:
        """Returns the load of all these jobs."""
        total = cls()
        for queued_job in queued_jobs:
            total = total.plus(queued_job.load)
        return total

    def plus(self, other: Load) -> Load:
        """Returns the sum of both."""
        return Load(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: Load) -> Load:
        """Returns the difference."""
        return Load(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def over_limit(self, current: Load, added: Load) -> str | None:
        """Returns which limit `added` on top of `current` exceeds; None if it exceeds none.

        A job of any size is allowed while nothing is queued.
        """
        requests, size, flops = current
        if requests and (
            requests + added[0] > self[0] or size + added[1] > self[1] or flops + added[2] > self[2]
        ):
            for limit, has, adds, unit in zip(self, current, added, _UNITS, strict=True):
                if has + adds > limit:
                    return (
                        f"the queue is full: {has} {unit} are queued or being received, "
                        f"the limit is {limit}"
                    )
        return None


class ThroughputEstimate:
    """Estimates the work done in a second from the last batches."""

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
        timer: the timer of its deadline, set once it is queued.
        batch_key: jobs with equal keys may run together.
        load: the work of the job.
    """

    job: Job
    future: ResultReceiver
    priority: int = DEFAULT_PRIORITY
    enqueued_at: float = field(default_factory=time.perf_counter)
    deadline: float | None = None
    timer: asyncio.TimerHandle | None = None
    batch_key: Hashable = field(init=False)
    load: Load = field(init=False)

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            self.priority = DEFAULT_PRIORITY
        self.batch_key = self.priority, self.job.batch_key
        self.load = Load(1, self.job.plan.bytes, self.job.plan.flops)

    @property
    def bytes(self) -> int:
        """Bytes of its tensors, in and out."""
        return self.load.bytes

    @property
    def is_expired(self) -> bool:
        """True once its deadline has passed."""
        return self.deadline is not None and self.deadline <= time.perf_counter()


class WorkQueue:
    """Bounded queue of jobs, by batch key; not safe across threads: the engine holds a lock.

    Args:
        limit: the most load that may be queued.

    Attributes:
        limit: as the argument.
        queued: the load of all queued jobs.
        on_change: called with that load when it changes.
        throughput: estimate from the batches that ran; the engine adds them.
    """

    def __init__(self, limit: Load) -> None:
        self.limit = limit
        self.queued = Load()
        self.on_change: Callable[[Load], None] = lambda _: None
        self.throughput = ThroughputEstimate()
        self._groups: dict[Hashable, deque[QueuedJob]] = defaultdict(deque)
        self._orders: dict[int, OrderedDict[QueuedJob, None]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def put(self, queued_job: QueuedJob) -> None:
        """Adds a job.

        Raises:
            ServiceUnavailable: too much is queued already.
        """
        load = queued_job.load
        if (why := self.limit.over_limit(self.queued, load)) is not None:
            raise ServiceUnavailable(why, retry_after=self.throughput.retry_after(self.queued))
        self._groups[queued_job.batch_key].append(queued_job)
        self._orders[queued_job.priority][queued_job] = None
        self.queued = self.queued.plus(load)
        self.on_change(self.queued)

    def remove(self, queued_job: QueuedJob) -> bool:
        """Removes a job; returns False if it is not queued any more."""
        if queued_job not in self._orders[queued_job.priority]:
            return False
        group = self._groups[queued_job.batch_key]
        group.remove(queued_job)
        if not group:
            del self._groups[queued_job.batch_key]
        self._discard(queued_job)
        self.on_change(self.queued)
        return True

    def clear(self) -> list[QueuedJob]:
        """Removes and returns all jobs."""
        removed = [queued_job for order in self._orders.values() for queued_job in order]
        self._groups.clear()
        for order in self._orders.values():
            order.clear()
        self.queued = Load()
        self.on_change(self.queued)
        return removed

    def find_oldest(self) -> QueuedJob | None:
        """Returns the oldest job of the highest priority; removes cancelled jobs before it."""
        for order in self._orders.values():
            while order:
                first = next(iter(order))
                if not first.future.cancelled():
                    return first
                self.remove(first)
        return None

    def take_batch(self, oldest: QueuedJob, max_jobs: int, max_bytes: int) -> list[QueuedJob]:
        """Removes and returns the batch of the oldest job.

        Args:
            oldest: as `find_oldest` returned it.
            max_jobs: limit of jobs in the batch, cancelled jobs not included.
            max_bytes: limit of the bytes of their tensors, beyond the first job.
        """
        group, total = self._groups[oldest.batch_key], 0
        batch: list[QueuedJob] = []
        while group and len(batch) < max_jobs:
            total += group[0].bytes
            if batch and total > max_bytes:
                break
            queued_job = group.popleft()
            if queued_job is oldest or not queued_job.future.cancelled():
                batch.append(queued_job)
            self._discard(queued_job)
        if not group:
            del self._groups[oldest.batch_key]
        self.on_change(self.queued)
        return batch

    def _discard(self, queued_job: QueuedJob) -> None:
        del self._orders[queued_job.priority][queued_job]
        self.queued = self.queued.minus(queued_job.load)
