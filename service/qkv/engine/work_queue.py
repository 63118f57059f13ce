"""Who waits for the device: in groups of equal keys, in order, no more than there is room for."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from qkv.errors import NotNow
from qkv.jobs.job import Job
from qkv.tensors import RawTensor

__all__ = ["DEFAULT_PRIORITY", "PRIORITIES", "Answer", "Load", "Queue", "Rate", "Waiting"]

PRIORITIES: Final = (1, 2, 3)
"""First, as everybody, last."""
DEFAULT_PRIORITY: Final = 2

_WORDS: Final = ("requests", "bytes of tensors", "floating-point operations")
_FADES: Final = 0.9  # what a batch counts in the rate, with each that comes after it
_LONGEST_S: Final = 60  # that anybody is told to stay away: estimates are no better


class Load(NamedTuple):
    """What there is to do, or was done.

    Attributes:
        requests: how many.
        bytes: of their tensors, in and out.
        flops: of their matrix products.
    """

    requests: int = 0
    bytes: int = 0
    flops: int = 0

    @classmethod
    def of(cls, every: Iterable[Waiting]) -> Load:
        """All that these ask for."""
        total = cls()
        for waiting in every:
            total = total.plus(waiting.load)
        return total

    def plus(self, more: Load) -> Load:
        """Both together."""
        return Load(self[0] + more[0], self[1] + more[1], self[2] + more[2])

    def minus(self, less: Load) -> Load:
        """What is left without it."""
        return Load(self[0] - less[0], self[1] - less[1], self[2] - less[2])

    def exceeds(self, there: Load, more: Load) -> str | None:
        """Whether these limits refuse more beside what is there, and why; whatever comes where
        there is nothing is let in, however large."""
        if there.requests:
            for most, has, comes, what in zip(self, there, more, _WORDS, strict=True):
                if has + comes > most:
                    return f"{has} {what} wait already; at most {most} may"
        return None


class Rate:
    """What is done in a second, of late."""

    def __init__(self) -> None:
        self._done, self._seconds = [0.0, 0.0, 0.0], 0.0

    def add(self, done: Load, seconds: float) -> None:
        """So much was done, and took so long."""
        self._done = [_FADES * was + more for was, more in zip(self._done, done, strict=True)]
        self._seconds = _FADES * self._seconds + seconds

    def retry_after(self, waits: Load) -> int:
        """Whole seconds until what waits should be done, by what there is most of: from 1 to 60."""
        done, seconds = self._done, self._seconds
        each = (w * seconds / d for w, d in zip(waits, done, strict=True) if d)
        seconds = round(max(each, default=0.0), 3)  # rounding errors make no second
        return max(1, min(math.ceil(seconds), _LONGEST_S))


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs by name, and the timing, all of it measured but `flops` and `bytes`."""

    outputs: dict[str, RawTensor]
    timing: dict[str, Any]


@dataclass(slots=True, eq=False)
class Waiting:
    """A job and who waits for it.

    Attributes:
        job: what is to run.
        future: told what came of it.
        priority: one of `PRIORITIES`.
        since: from when on it waits, by `time.perf_counter`.
        until: when its time is up, by the same clock; None: never.
    """

    job: Job
    future: asyncio.Future[Answer]
    priority: int = DEFAULT_PRIORITY
    since: float = field(default_factory=time.perf_counter)
    until: float | None = None

    @property
    def key(self) -> Hashable:
        """Those with equal keys may run together."""
        return self.priority, self.job.key

    @property
    def bytes(self) -> int:
        """Of its tensors, in and out."""
        return self.job.bytes_in + self.job.bytes_out

    @property
    def load(self) -> Load:
        """What it asks for."""
        return Load(1, self.bytes, self.job.flops)

    @property
    def is_late(self) -> bool:
        """Whether its time is up."""
        return self.until is not None and self.until <= time.perf_counter()


class Queue:
    """Not safe across threads: its owner has a lock.

    Args:
        most: what may wait.

    Attributes:
        waits: what does.
    """

    def __init__(self, most: Load) -> None:
        self._most = most
        self.waits = Load()
        self.rate = Rate()
        self._groups: dict[Hashable, deque[Waiting]] = defaultdict(deque)
        self._orders: dict[int, OrderedDict[Waiting, None]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def put(self, waiting: Waiting) -> None:
        """Has one more wait.

        Raises:
            NotNow: too much does already.
        """
        load = waiting.load
        if (why := self._most.exceeds(self.waits, load)) is not None:
            raise NotNow(why, retry_after=self.rate.retry_after(self.waits))
        self._groups[waiting.key].append(waiting)
        self._orders[waiting.priority][waiting] = None
        self.waits = self.waits.plus(load)

    def drop(self, waiting: Waiting) -> bool:
        """Takes one out; false where its turn has come already."""
        if waiting not in self._orders[waiting.priority]:
            return False
        group = self._groups[waiting.key]
        group.remove(waiting)
        if not group:
            del self._groups[waiting.key]
        self._forget(waiting)
        return True

    def clear(self) -> list[Waiting]:
        """Takes all out."""
        every = [waiting for order in self._orders.values() for waiting in order]
        self._groups.clear()
        for order in self._orders.values():
            order.clear()
        self.waits = Load()
        return every

    def oldest(self) -> Waiting | None:
        """Who has waited longest, of those with the first priority there is, and whose caller has
        not gone."""
        for order in self._orders.values():
            while order:
                first = next(iter(order))
                if not first.future.cancelled():
                    return first
                self.drop(first)
        return None

    def take(self, oldest: Waiting, most: int, most_bytes: int) -> list[Waiting]:
        """Takes out those that run with the oldest, so many at most, and of so many bytes beyond
        the first; those whose callers leave meanwhile run for nobody."""
        group, total = self._groups[oldest.key], 0
        batch: list[Waiting] = []
        while group and len(batch) < most:
            total += group[0].bytes
            if batch and total > most_bytes:
                break
            waiting = group.popleft()
            if waiting is oldest or not waiting.future.cancelled():
                batch.append(waiting)
            self._forget(waiting)
        if not group:
            del self._groups[oldest.key]
        return batch

    def _forget(self, waiting: Waiting) -> None:
        del self._orders[waiting.priority][waiting]
        self.waits = self.waits.minus(waiting.load)
