"""Request counters and histograms of all processes in shared memory, for Prometheus.

Each worker writes its own row, on its event loop only; the worker that serves GET /metrics sums all
rows. Rows outlive their workers, so that no sum decreases. `model_stats` counts batches, in the
process that has the device.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from qkv.errors import QkvError
from qkv.telemetry.key_usage import KeyUsage, KeyUsageRecorder
from qkv.telemetry.times import Times

__all__ = [
    "BUCKETS",
    "HISTOGRAMS",
    "OTHER",
    "OUTCOMES",
    "UNKNOWN",
    "MetricsRecorder",
    "SharedMetrics",
    "Usage",
    "float64_view",
]

BUCKETS: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the histogram buckets, in seconds: from a tiny job to the longest waits."""

HISTOGRAMS: Final = ("request_duration", "queue_wait", "compute")
"""The histograms of each variant."""

OUTCOMES: Final = ("ok", *sorted({kind.name for kind in QkvError.__subclasses__()}))
"""Outcomes of a request: "ok", or the name of the problem."""

UNKNOWN: Final = "unknown"
"""Label in place of a variant that does not exist: a client's text must not create a series."""
OTHER: Final = "other"
"""Label of requests that run no variant."""

_TOTALS: Final = (
    "request_body_bytes",
    "response_body_bytes",
    "log_lines_dropped",
    "batches_with_same_bits",
    "batches_with_other_bits",
)


class Usage(NamedTuple):
    """Queue of a process's engine, and its use of the device's memory."""

    queued_count: int = 0
    queued_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    total_bytes: int = 0


class SharedMetrics:
    """The counts of all processes, in shared memory; create it before the fork.

    Args:
        variants: names of the variants.
        processes: number of processes that count.
        layers: names of the loaded layers.

    Attributes:
        variants: as the argument.
        key_usage: the counts of each API key.
    """

    def __init__(self, variants: Sequence[str], processes: int, layers: Sequence[str] = ()) -> None:
        self.variants, self._layers = tuple(variants), tuple(layers)
        shapes = (
            (processes, len(variants) + 2, len(OUTCOMES)),
            (processes, len(variants), len(HISTOGRAMS), len(BUCKETS) + 2),
            (processes, len(_TOTALS)),
            (processes, len(layers), 2),  # runs, and their seconds of compute
        )
        self.key_usage = KeyUsage(processes)
        block = mmap.mmap(-1, 8 * sum(int(np.prod(shape)) for shape in shapes))
        arrays, start = [], 0
        for shape in shapes:
            arrays.append(np.frombuffer(block, "f8", int(np.prod(shape)), start).reshape(shape))
            start += arrays[-1].nbytes
        self._requests, self._histograms, self._totals, self._of_layers = arrays

    def recorder(self, process: int) -> MetricsRecorder:
        """Returns the recorder of a process."""
        names = (*self.variants, UNKNOWN, OTHER)
        return MetricsRecorder(
            {name: float64_view(self._requests[process, i]) for i, name in enumerate(names)},
            {
                name: [float64_view(row) for row in self._histograms[process, i]]
                for i, name in enumerate(self.variants)
            },
            float64_view(self._totals[process]),
            self.key_usage.recorder(process),
            {n: float64_view(self._of_layers[process, i]) for i, n in enumerate(self._layers)},
        )

    @property
    def requests(self) -> dict[str, dict[str, float]]:
        """The number of requests with each outcome, by variant, with UNKNOWN and OTHER."""
        names = (*self.variants, UNKNOWN, OTHER)
        rows = self._requests.sum(0).tolist()
        return {
            n: dict(zip(OUTCOMES, row, strict=True)) for n, row in zip(names, rows, strict=True)
        }

    def histogram(self, variant: str, name: str) -> tuple[list[float], float]:
        """Returns the count of each bucket, the last without a bound, and the sum in seconds."""
        rows = self._histograms[:, self.variants.index(variant), HISTOGRAMS.index(name)]
        *counts, total = rows.sum(0).tolist()
        return counts, total

    @property
    def layers(self) -> dict[str, tuple[float, float]]:
        """The number of runs of each loaded layer, and their seconds of compute."""
        rows = self._of_layers.sum(0).tolist()
        return {name: (runs, s) for name, (runs, s) in zip(self._layers, rows, strict=True)}

    @property
    def totals(self) -> dict[str, float]:
        """The other counters, by name."""
        return dict(zip(_TOTALS, self._totals.sum(0).tolist(), strict=True))


class MetricsRecorder:
    """A count of the requests of one process; only its event loop may call it, except for
    `add_dropped_log_lines`.

    Attributes:
        key_usage: counts the requests of each API key.
    """

    def __init__(
        self,
        requests: dict[str, memoryview[float]],
        times: dict[str, list[memoryview[float]]],
        totals: memoryview[float],
        key_usage: KeyUsageRecorder,
        layers: Mapping[str, memoryview[float]],
    ) -> None:
        self._layers = layers
        self._requests, self._histograms, self._totals = requests, times, totals
        self.key_usage = key_usage
        self._outcomes = {name: place for place, name in enumerate(OUTCOMES)}

    def record_response(
        self, variant: str, outcome: str, seconds: float, body_bytes: int, times: Times | None
    ) -> None:
        """Counts a response.

        Args:
            variant: its name, UNKNOWN or OTHER.
            outcome: one of OUTCOMES.
            seconds: seconds since the request's headers were received.
            body_bytes: size of the response's body.
            times: of the run; None if nothing has run.
        """
        self._requests[variant][self._outcomes[outcome]] += 1
        self._totals[1] += body_bytes
        if (histograms := self._histograms.get(variant)) is None:
            return
        duration, queue_wait, compute = histograms
        if outcome == "ok":
            duration[bisect_left(BUCKETS, seconds)] += 1
            duration[-1] += seconds
        if times is not None:
            queue_wait[bisect_left(BUCKETS, times.queue_s)] += 1
            queue_wait[-1] += times.queue_s
            compute[bisect_left(BUCKETS, times.compute_s)] += 1
            compute[-1] += times.compute_s

    def record_layer(self, layer: str, times: Times) -> None:
        """Counts a run of a loaded layer."""
        self._layers[layer][0] += 1
        self._layers[layer][1] += times.compute_s

    @property
    def layers(self) -> Iterable[str]:
        """The names of all loaded layers."""
        return self._layers

    def add_request_bytes(self, count: int) -> None:
        """Counts received bytes of request bodies."""
        self._totals[0] += count

    def add_dropped_log_lines(self, count: int) -> None:
        """Counts dropped lines of the request log; any thread may call it, one at a time."""
        self._totals[2] += count

    def record_batch_check(self, is_same: bool) -> None:
        """Counts a check of a batch's bits; only the device thread may call it."""
        self._totals[3 if is_same else 4] += 1

    @property
    def variants(self) -> Iterable[str]:
        """The names of all variants."""
        return self._histograms

    def has_variant(self, variant: str) -> bool:
        """Returns True if there is such a variant."""
        return variant in self._histograms


def float64_view(row: np.ndarray) -> memoryview[float]:
    """Returns a view of float64 numbers. An increment is a store of eight bytes, which no reader
    sees in part, and is faster than in an array."""
    return row.data.cast("B").cast("d")
