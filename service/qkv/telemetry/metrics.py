"""What all processes have done together: counts in memory that they share, for Prometheus.

Each worker writes its own row, on its event loop alone, and whoever is asked sums them. Rows
outlive their workers, so that no sum ever falls. What ran in batches is counted in `models`, by
whichever process has the device.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from qkv.errors import QkvError

__all__ = [
    "BUCKETS",
    "OTHER",
    "OUTCOMES",
    "TIMES",
    "UNKNOWN",
    "Meter",
    "Metrics",
    "Usage",
    "numbers",
]

BUCKETS: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Seconds, upper bounds: from a tiny attention to the longest that anybody waits for."""

TIMES: Final = ("request_duration", "queue_wait", "compute")
"""The histograms of each variant."""

OUTCOMES: Final = ("ok", *sorted({kind.name for kind in QkvError.__subclasses__()}))
"""Of requests: answered, or the name of the problem."""

UNKNOWN: Final = "unknown"
"""In place of a variant that does not exist: whatever callers think of makes no new series."""
OTHER: Final = "other"
"""In place of one where nothing is to run."""

_TOTALS: Final = ("request_body_bytes", "response_body_bytes", "log_lines_dropped")


class Usage(NamedTuple):
    """What waits for a process's device, and the bytes of memory that it has of it."""

    waiting: int = 0
    waiting_bytes: int = 0
    allocated: int = 0
    reserved: int = 0
    memory: int = 0


class Metrics:
    """The counts of so many processes, made before they are forked.

    Args:
        variants: the names there are.
        processes: how many count.
    """

    def __init__(self, variants: Sequence[str], processes: int) -> None:
        self.variants = tuple(variants)
        shapes = (
            (processes, len(variants) + 2, len(OUTCOMES)),
            (processes, len(variants), len(TIMES), len(BUCKETS) + 2),
            (processes, len(_TOTALS)),
        )
        block = mmap.mmap(-1, 8 * sum(int(np.prod(shape)) for shape in shapes))
        arrays, start = [], 0
        for shape in shapes:
            arrays.append(np.frombuffer(block, "f8", int(np.prod(shape)), start).reshape(shape))
            start += arrays[-1].nbytes
        self._requests, self._times, self._totals = arrays

    def meter(self, process: int) -> Meter:
        """What a process counts with."""
        places = (*self.variants, UNKNOWN, OTHER)
        return Meter(
            {name: numbers(self._requests[process, i]) for i, name in enumerate(places)},
            {
                name: [numbers(row) for row in self._times[process, i]]
                for i, name in enumerate(self.variants)
            },
            numbers(self._totals[process]),
        )

    @property
    def requests(self) -> dict[str, dict[str, float]]:
        """How many requests had each outcome, by variant; UNKNOWN and OTHER too."""
        places = (*self.variants, UNKNOWN, OTHER)
        rows = self._requests.sum(0).tolist()
        return {
            n: dict(zip(OUTCOMES, row, strict=True)) for n, row in zip(places, rows, strict=True)
        }

    def times(self, variant: str, name: str) -> tuple[list[float], float]:
        """How many lie in each bucket and in none before, the last without a bound; their sum."""
        rows = self._times[:, self.variants.index(variant), TIMES.index(name)]
        *counts, total = rows.sum(0).tolist()
        return counts, total

    @property
    def totals(self) -> dict[str, float]:
        """All else that is counted, by name."""
        return dict(zip(_TOTALS, self._totals.sum(0).tolist(), strict=True))


class Meter:
    """Counts what becomes of one process's requests, for its event loop alone but for `dropped`."""

    def __init__(
        self,
        requests: dict[str, memoryview[float]],
        times: dict[str, list[memoryview[float]]],
        totals: memoryview[float],
    ) -> None:
        self._requests, self._times, self._totals = requests, times, totals
        self._outcomes = {name: place for place, name in enumerate(OUTCOMES)}

    def ran(self, variant: str, queue_s: float, compute_s: float) -> None:
        """A request was run: how long it waited, and how long the call took that ran it."""
        _, queue, compute = self._times[variant]
        queue[bisect_left(BUCKETS, queue_s)] += 1
        queue[-1] += queue_s
        compute[bisect_left(BUCKETS, compute_s)] += 1
        compute[-1] += compute_s

    def answered(self, place: str, outcome: str, seconds: float, sent: int) -> None:
        """A request has its answer.

        Args:
            place: the variant's name, UNKNOWN or OTHER.
            outcome: one of OUTCOMES.
            seconds: since its headers came.
            sent: bytes of the answer's body.
        """
        self._requests[place][self._outcomes[outcome]] += 1
        self._totals[1] += sent
        if outcome == "ok" and (times := self._times.get(place)) is not None:
            duration = times[0]
            duration[bisect_left(BUCKETS, seconds)] += 1
            duration[-1] += seconds

    def received(self, count: int) -> None:
        """So many bytes of bodies came."""
        self._totals[0] += count

    def dropped(self, count: int) -> None:
        """So many lines of the request log found no room, or could not be written; called by one
        thread at a time, whichever it is."""
        self._totals[2] += count

    def has(self, variant: str) -> bool:
        """Whether there is such a variant."""
        return variant in self._times


def numbers(row: np.ndarray) -> memoryview[float]:
    """A view of float64 numbers: an increment is a store of eight bytes, which no reader sees half
    of, and quicker than an array's."""
    return row.data.cast("B").cast("d")
