"""The families of cells that processes count in: each is declared once, here.

A declaration gives the cells in shared memory (`counters`), the handles of the recorder, and, if it
has a help text, the metric in GET /metrics (`collector`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, Literal

from qkv.errors import QkvError

BUCKETS: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the histogram buckets, in seconds: from a tiny job to the longest waits."""

OUTCOMES: Final = ("ok", *sorted({kind.name for kind in QkvError.__subclasses__()}))
"""Outcomes of a request: "ok", or the name of the problem."""

UNKNOWN: Final = "unknown"
"""Label in place of a variant that does not exist: a client's text must not create a series."""
OTHER: Final = "other"
"""Label of requests that run no variant."""

MAX_KEYS: Final = 4096
"""API keys that one process counts; that of a removed key keeps its place."""

STAGES: Final = ("compute_input", "compute_infer", "compute_output")
"""Stages of a job, as Triton names them (docs/protocol/extension_statistics.md)."""


class Family:
    """A family of cells: each process has one for every combination of the values of its labels.

    Args:
        kind: cells of a gauge are cleared when their process ends; the others outlive it.
        name: in GET /metrics it has the prefix `qkv_`.
        help: of the metric; empty: GET /metrics does not have these cells as they are.
        **labels: the values of each label; the names of keys are in shared memory.

    Attributes:
        cell_count: number of cells for each combination. A histogram has one for each bucket, the
            last without a bound, and one for its sum.
        shape: the number of values of each label, then `cell_count` of a histogram.
    """

    def __init__(
        self,
        kind: Literal["counter", "gauge", "histogram"],
        name: str,
        help: str = "",
        **labels: Sequence[str],
    ) -> None:
        self.kind, self.name, self.help, self.labels = kind, name, help, labels
        sizes = tuple(map(len, labels.values()))
        self.cell_count = len(BUCKETS) + 2 if kind == "histogram" else 1
        self.shape = (*sizes, self.cell_count) if kind == "histogram" else sizes


_counter, _gauge, _histogram = (
    partial(Family, "counter"),
    partial(Family, "gauge"),
    partial(Family, "histogram"),
)


def families(
    variants: Sequence[str], layers: Sequence[str], devices: Sequence[str], max_batch_size: int
) -> Iterator[Family]:
    """Yields all families of a service with these variants, loaded layers, device processes and
    largest batch."""
    yield from _of_requests(variants, layers)
    yield from _of_models((*variants, *layers), max_batch_size)
    yield from _of_processes(devices)


def _of_requests(variants: Sequence[str], layers: Sequence[str]) -> tuple[Family, ...]:
    counter, histogram, key = _counter, _histogram, ("",) * MAX_KEYS
    known = (*variants, UNKNOWN)
    return (
        counter(
            "requests", "Requests to run a variant, by outcome.", variant=known, outcome=OUTCOMES
        ),
        counter("other_requests", "All other requests.", outcome=OUTCOMES),
        counter("request_body_bytes", "Bytes of request bodies."),
        counter("response_body_bytes", "Bytes of response bodies."),
        counter("log_lines_dropped", "Lines of the request log that were dropped."),
        counter("key_requests", "Requests of the API key.", key=key),
        counter("key_rejected", "Requests of the API key beyond its share of the queue.", key=key),
        counter("key_compute_seconds", "Compute time of its requests, in seconds.", key=key),
        histogram(
            "request_duration_seconds",
            "From the headers of a request to the end of its response.",
            variant=variants,
        ),
        histogram(
            "queue_wait_seconds", "From the submission of a job to its start.", variant=variants
        ),
        histogram(
            "compute_seconds",
            "The call that ran a job; jobs of one batch share it.",
            variant=variants,
        ),
        counter("layer_runs", "Runs of a loaded layer.", layer=layers),
        counter(
            "layer_compute_seconds",
            "The calls that ran a loaded layer; jobs of one batch share them.",
            layer=layers,
        ),
    )


def _of_models(models: Sequence[str], max_batch_size: int) -> tuple[Family, ...]:
    """Returns the families of which the statistics of the Open Inference Protocol consist."""
    sizes = tuple(map(str, range(1, max_batch_size + 1)))
    cells = ("count", "success", "queue", *STAGES)
    return (
        _counter("last_inference_ms", model=models),
        _counter("failures", model=models),
        _counter("failure_seconds", model=models),
        _counter("shared_seconds", model=models, stage=STAGES),
        _counter("batches", model=models, size=sizes, cell=cells),
    )


def _of_processes(devices: Sequence[str]) -> tuple[Family, ...]:
    """Returns the families of the state of processes, which all of them and the supervisor read."""
    return (
        _gauge("requests_in_progress", "Requests to run a variant without a response."),
        _gauge("connections", "Open connections."),
        _gauge("queue_depth", "Requests in the queue."),
        _gauge("queue_bytes", "Bytes of input and output tensors in the queue."),
        _gauge("memory_allocated"),
        _gauge("memory_reserved"),
        _gauge("memory_total"),
        _counter("batches_with_same_bits", "Checks that found the same bits in a batch as alone."),
        _counter("batches_with_other_bits", "Checks that found other bits in a batch than alone."),
        _gauge("queued_work", device=devices),
        _gauge("heartbeat"),  # last time its event loop ran; 0: not started
        _gauge("busy_since"),  # start of the batch that its device runs; 0: idle
        _gauge("pid"),  # id of the process; 0: not started
        _gauge("ready"),  # 1: accepts requests or jobs
        _gauge("was_ready"),  # 1: has accepted some since it started
        _counter("starts"),
    )
