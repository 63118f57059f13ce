"""The table of counters in shared memory, and the recorder of a process.

Each process writes its own row; every process reads the sums of all rows. A write is a store of
eight bytes, which no reader sees in part, so that no lock is needed.
"""

from __future__ import annotations

import mmap
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from qkv.telemetry.families import (
    BATCH_CELLS,
    BUCKETS,
    FAMILIES,
    MAX_KEYS,
    OTHER,
    OUTCOMES,
    UNKNOWN,
    Family,
)
from qkv.telemetry.times import Times

_PER_SIZE: Final = len(BATCH_CELLS)


class Counters:
    """The cells of all processes; create it before the fork.

    Args:
        labels: the values of each label.
        processes: number of rows.
        flag_count: number of flags of the whole service.

    Attributes:
        labels: as the argument.
        rows: a row for each process, with an array of float64 for each family, by its name.
        flags: of the whole service; a memoryview, since one is read for each request.
    """

    def __init__(
        self, labels: Mapping[str, Sequence[str]], processes: int, flag_count: int
    ) -> None:
        # keys may be added while the service runs: each process names those that it has seen
        self.labels = {**labels, "key": ("",) * MAX_KEYS}
        row = np.dtype(
            [(f.name, "f8", self._shape(f)) for f in FAMILIES] + [("key_names", "S64", (MAX_KEYS,))]
        )
        block = mmap.mmap(-1, row.itemsize * processes + flag_count)  # shared with forks
        self.rows: Any = np.frombuffer(block, row, processes)
        self.flags = memoryview(block)[self.rows.nbytes :].cast("?")

    def _shape(self, family: Family) -> tuple[int, ...]:
        sizes = tuple(len(self.labels[label]) for label in family.labels)
        return (*sizes, len(BUCKETS) + 2) if family.kind == "histogram" else sizes

    def cells(self, process: int, name: str) -> memoryview[float]:
        """Returns the cells of a family in the row of a process. They are faster to write than
        those of an array."""
        cells: memoryview[float] = self.rows[name][process : process + 1].reshape(-1).data
        return cells

    def cells_by(
        self, process: int, label: str, *names: str
    ) -> dict[str, tuple[memoryview[float], ...]]:
        """Returns the same cells of families by the values of a label, the first of each."""
        values, families = self.labels[label], [self.cells(process, name) for name in names]
        sizes = [len(cells) // max(1, len(values)) for cells in families]
        return {
            value: tuple(c[i * n : (i + 1) * n] for c, n in zip(families, sizes, strict=True))
            for i, value in enumerate(values)
        }

    def total(self, name: str) -> Any:
        """Returns the sums of all processes, with the shape of the family."""
        return self.rows[name].sum(0)

    def samples(self, family: Family) -> Iterator[tuple[tuple[str, ...], list[float]]]:
        """Yields the values of a family's labels, with the sum of all processes for each cell."""
        if "key" in family.labels:
            totals: defaultdict[str, float] = defaultdict(float)
            is_named = self.rows["key_names"] != b""
            names, values = self.rows["key_names"][is_named], self.rows[family.name][is_named]
            for name, value in zip(names.tolist(), values.tolist(), strict=True):
                totals[name.decode()] += value
            yield from (((name,), [totals[name]]) for name in sorted(totals))
            return
        cell_count = len(BUCKETS) + 2 if family.kind == "histogram" else 1
        cells = self.total(family.name).reshape(-1, cell_count).tolist()
        values = product(*(self.labels[label] for label in family.labels))
        yield from zip(values, cells, strict=True)

    def clear_gauges(self, process: int) -> None:
        """Clears the cells of a process that has ended, except for its counts."""
        for family in FAMILIES:
            if family.kind == "gauge":
                self.rows[family.name][process] = 0.0


class Recorder:
    """The counts of one process.

    Only its event loop may call it, except for the methods that name other threads.

    Attributes:
        variants: the names of all variants.
        layers: the names of all loaded layers.
    """

    def __init__(self, counters: Counters, process: int) -> None:
        cells, cells_by = partial(counters.cells, process), partial(counters.cells_by, process)
        requests = cells_by("variant", "requests") | {OTHER: (cells("other_requests"),)}
        self._requests = {name: outcomes for name, (outcomes,) in requests.items()}
        self._outcomes = {name: place for place, name in enumerate(OUTCOMES)}
        times = ("request_duration_seconds", "queue_wait_seconds", "compute_seconds")
        self._histograms = cells_by("variant", *times)
        del self._histograms[UNKNOWN]  # runs nothing
        self._received, self._sent = cells("request_body_bytes"), cells("response_body_bytes")
        self._dropped_lines = cells("log_lines_dropped")
        self._checks = cells("batches_with_other_bits"), cells("batches_with_same_bits")
        self._layers = cells_by("layer", "layer_runs", "layer_compute_seconds")
        self._key_names = counters.rows["key_names"][process]
        self._key_places = {n.decode(): i for i, n in enumerate(self._key_names.tolist()) if n}
        self._keys = [cells(f"key_{of}") for of in ("requests", "rejected", "compute_seconds")]
        self._batches = cells_by("model", "last_inference_ms", "shared_seconds", "batches")
        self._failures = cells_by("model", "failures", "failure_seconds")
        self._lock = threading.Lock()
        self.variants, self.layers = self._histograms.keys(), self._layers.keys()

    def record_response(
        self,
        variant: str,
        outcome: str,
        seconds: float,
        sizes: tuple[int, int],
        times: Times | None,
    ) -> None:
        """Counts a request and its response.

        Args:
            variant: its name, UNKNOWN or OTHER.
            outcome: one of OUTCOMES.
            seconds: seconds since the request's headers were received.
            sizes: bytes of the bodies that were received and sent.
            times: of the run; None if nothing has run.
        """
        self._requests[variant][self._outcomes[outcome]] += 1
        received_bytes, sent_bytes = sizes
        self._received[0] += received_bytes
        self._sent[0] += sent_bytes
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
        runs, seconds = self._layers[layer]
        runs[0] += 1
        seconds[0] += times.compute_s

    def add_key(self, name: str) -> int | None:
        """Adds the name of a key with counts of zero; returns its place, None if there is none
        left."""
        place = self._key_places.get(name)
        if place is None and len(self._key_places) < MAX_KEYS:
            place = self._key_places[name] = len(self._key_places)
            self._key_names[place] = name.encode()
        return place

    def record_key(self, name: str, *, is_rejected: bool, compute_s: float) -> None:
        """Counts a request of the key with this name.

        Args:
            name: of the key.
            is_rejected: the key had its share of the queue.
            compute_s: seconds of computation, its part of those of a batch.
        """
        if (place := self.add_key(name)) is not None:
            requests, rejected, seconds = self._keys
            requests[place] += 1
            rejected[place] += is_rejected
            seconds[place] += compute_s

    def add_dropped_log_lines(self, count: int) -> None:
        """Counts dropped lines of the request log; any thread may call it, one at a time."""
        self._dropped_lines[0] += count

    def record_batch_check(self, is_same: bool) -> None:
        """Counts a check of a batch's bits; only the device thread may call it."""
        self._checks[is_same][0] += 1

    def record_batch(self, name: str, requests: Sequence[Times]) -> None:
        """Records a batch in the statistics of a model; any thread may call it.

        Args:
            name: name of the model.
            requests: the times of each request.
        """
        last, shared, sizes = self._batches[name]
        first = _PER_SIZE * (len(requests) - 1)
        with self._lock:
            last[0] = time.time() * 1e3
            sizes[first] += 1
            for times in requests:
                sizes[first + 1] += times.total_s
                sizes[first + 2] += times.queue_s
                count = times.stacked_count
                sizes[first + 3] += times.load_s / count
                sizes[first + 4] += times.compute_s / count
                sizes[first + 5] += times.split_s / count
                if count > 1:  # each request counts the shared seconds in full
                    shared[0] += times.load_s - times.load_s / count
                    shared[1] += times.compute_s - times.compute_s / count
                    shared[2] += times.split_s - times.split_s / count

    def record_failure(self, name: str, total_s: float) -> None:
        """Records a queued request that failed or expired; any thread may call it.

        Args:
            name: name of the model.
            total_s: seconds since its submission.
        """
        failures, seconds = self._failures[name]
        with self._lock:
            failures[0] += 1
            seconds[0] += total_s
