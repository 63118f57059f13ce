"""The metrics of the service, as the client library of Prometheus takes them from a collector.

Its own metrics are of no use here: several processes need its multiprocess mode, which writes to
files, with a lock for each cell.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from qkv.telemetry.families import BATCH_CELLS, BUCKETS, FAMILIES, OUTCOMES, UNKNOWN, Family
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__

_BATCH_SIZES: Final = tuple(1 << i for i in range(13))  # up to the largest QKV_MAX_BATCH
_KINDS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
_PROCESS: Final = (
    ("gauge", "up", "1 while the device process accepts jobs."),
    ("counter", "restarts", "Restarts of the device process."),
    ("gauge", "queue_depth", "Requests in the queue of the device process."),
    ("counter", "requests", "Requests that the device process ran, without gradients."),
    ("counter", "seconds", "Compute time in seconds, once for each batch, without gradients."),
    (
        "gauge",
        "memory_reserved_bytes",
        "Bytes of device memory that the device process has reserved.",
    ),
)
# what a metric of several processes is, where it is not their sum
_COMBINED: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    "process_start_time_seconds": min,
    "process_open_fds": max,
    "process_max_fds": min,
}


class ServiceCollector(Collector):
    """The metrics of all processes. Every series exists from the start.

    Args:
        shared_state: of the service.
        device: as responses give it.
    """

    def __init__(self, shared_state: SharedState, device: str) -> None:
        self._state, self._device = shared_state, device

    def collect(self) -> Iterator[Metric]:
        """Yields each family of metrics with its samples."""
        about, build = "The version and the device of the service.", (__version__, self._device)
        yield _family("gauge", "build_info", about, [(build, 1)], "version", "device")
        for family in FAMILIES:
            if family.help:
                yield self._declared(family)
        yield self._rejected()
        yield from self._batches()
        yield from self._gauges()
        yield from self._device_processes()
        yield from process_families(self._state.pids)

    def _declared(self, family: Family) -> Metric:
        """Returns a family that has the sums of its cells as they are."""
        samples = self._state.counters.samples(family)
        if family.kind == "histogram":
            histograms = ((on, counts, s) for on, (*counts, s) in samples if UNKNOWN not in on)
            return _histogram(family.name, family.help, BUCKETS, histograms)
        values = ((labels, value) for labels, (value,) in samples)
        return _family(family.kind, family.name, family.help, values, *family.labels)

    def _rejected(self) -> Metric:
        total = self._state.counters.total
        counts = total("requests").sum(0) + total("other_requests")
        _, *errors = zip(zip(OUTCOMES), counts.tolist(), strict=True)
        help_text = "Requests with an error as the response, by error."
        return _family("counter", "rejected", help_text, errors, "reason")

    def _batches(self) -> Iterator[Metric]:
        variants = self._state.variants
        totals = self._state.counters.total("batches")[: len(variants)]
        sizes = np.arange(1, totals.shape[1] + 1)
        places, bucket_count = np.searchsorted(_BATCH_SIZES, sizes), len(_BATCH_SIZES) + 1
        histograms = (
            ((name,), np.bincount(places, counts, bucket_count).tolist(), float(counts @ sizes))
            for name, counts in zip(variants, totals[..., 0], strict=True)
        )
        help_text = "Requests in a batch, without gradients."
        yield _histogram("batch_size", help_text, _BATCH_SIZES, histograms)
        seconds = totals[..., BATCH_CELLS.index("compute_infer")].sum(1).tolist()
        help_text = "Compute time of the device in seconds, once for each batch, without gradients."
        samples = zip(zip(variants), seconds, strict=True)
        yield _family("counter", "device_seconds", help_text, samples, "variant")

    def _gauges(self) -> Iterator[Metric]:
        state, total = self._state, self._state.counters.total
        ready = state.worker_rows["ready"].sum()
        for name, help_text, value in (
            ("workers", "Worker processes.", len(state)),
            ("workers_ready", "Worker processes that accept requests.", ready),
        ):
            yield GaugeMetricFamily(f"qkv_{name}", help_text, value)
        for name, help_text, value in (
            ("allocated", "Bytes of device memory that tensors use.", total("memory_allocated")),
            (
                "reserved",
                "Bytes that the device's allocator has reserved.",
                total("memory_reserved"),
            ),
            ("total", "Bytes of device memory.", state.device_memory_bytes),
        ):
            samples = [((), value)] if state.device_memory_bytes else []  # 0 on a CPU
            yield _family("gauge", f"device_memory_{name}_bytes", help_text, samples)

    def _device_processes(self) -> Iterator[Metric]:
        """Yields what differs between device processes; without any, the families are empty."""
        state, rows = self._state, self._state.device_rows
        labels = [(str(number), device) for number, device in enumerate(state.devices)]
        columns = (
            rows["ready"],
            state.device_restarts,
            rows["queue_depth"],
            [inferences for inferences, _ in state.device_totals],
            [seconds for _, seconds in state.device_totals],
            rows["memory_reserved"],
        )
        for (kind, name, help_text), values in zip(_PROCESS, columns, strict=True):
            samples = zip(labels, values, strict=True)
            yield _family(kind, f"device_process_{name}", help_text, samples, "process", "device")


def process_families(pids: Sequence[int]) -> list[Metric]:
    """Returns the families of Prometheus's own client for several processes together, from Linux's
    /proc: none without it.

    Args:
        pids: the first process has started the others, of which some may have exited.
    """
    values = defaultdict[str, list[float]](list)
    for family in (family for pid in pids for family in _of_process(pid)):
        values[family.name].append(family.samples[0].value)
    first = list(_of_process(pids[0]))
    for family in first:
        value = _COMBINED.get(family.name, sum)(values[family.name])
        if family.name == "process_cpu_seconds":
            value += _seconds_of_exited(pids[0])
        family.samples[0] = family.samples[0]._replace(value=value)
    return first


def _of_process(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()


def _seconds_of_exited(pid: int) -> float:
    """Returns the CPU time of the children of a process that have exited: proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def _family(
    kind: str,
    name: str,
    help_text: str,
    samples: Iterable[tuple[Sequence[str], float]],
    *labels: str,
) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily = _KINDS[kind](
        f"qkv_{name}", help_text, labels=labels
    )
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(
    name: str,
    help_text: str,
    bounds: Sequence[float],
    histograms: Iterable[tuple[Sequence[str], Sequence[float], float]],
) -> Metric:
    """Returns histograms of variants: labels, counts, and sum of each. The last count is that of
    the bucket without a bound."""
    family = HistogramMetricFamily(f"qkv_{name}", help_text, labels=["variant"])
    edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    for labels, counts, total in histograms:
        family.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), total)
    return family
