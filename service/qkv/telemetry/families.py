"""The families of cells that processes count in: each is declared once, here.

A declaration gives the cells in shared memory (`counters`), the handles of the recorder, and, if it
has a help text, the metric in GET /metrics (`collector`).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

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
BATCH_CELLS: Final = ("count", "success", "queue", *STAGES)
"""Cells of a batch size: batches, then the seconds of their requests, in the queue and by stage."""


class Family(NamedTuple):
    """A family of cells: each process has one for every combination of the values of its labels.

    Attributes:
        kind: cells of a gauge are cleared when their process ends; the others outlive it. A
            histogram has a cell for each bucket, the last without a bound, and one for its sum.
        name: in GET /metrics it has the prefix `qkv_`.
        help: of the metric; empty: GET /metrics does not have these cells as they are.
        labels: their names; `SharedState` knows the values.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str = ""
    labels: tuple[str, ...] = ()


FAMILIES: Final = (
    Family("counter", "requests", "Requests to run a variant, by outcome.", ("variant", "outcome")),
    Family("counter", "other_requests", "All other requests.", ("outcome",)),
    Family("counter", "request_body_bytes", "Bytes of request bodies."),
    Family("counter", "response_body_bytes", "Bytes of response bodies."),
    Family("counter", "log_lines_dropped", "Lines of the request log that were dropped."),
    Family("counter", "key_requests", "Requests of the API key.", ("key",)),
    Family(
        "counter",
        "key_rejected",
        "Requests of the API key beyond its share of the queue.",
        ("key",),
    ),
    Family("counter", "key_compute_seconds", "Compute time of its requests, in seconds.", ("key",)),
    Family(
        "histogram",
        "request_duration_seconds",
        "From the headers of a request to the end of its response.",
        ("variant",),
    ),
    Family(
        "histogram",
        "queue_wait_seconds",
        "From the submission of a job to its start.",
        ("variant",),
    ),
    Family(
        "histogram",
        "compute_seconds",
        "The call that ran a job; jobs of one batch share it.",
        ("variant",),
    ),
    Family("counter", "layer_runs", "Runs of a loaded layer.", ("layer",)),
    Family(
        "counter",
        "layer_compute_seconds",
        "The calls that ran a loaded layer; jobs of one batch share them.",
        ("layer",),
    ),
    Family(
        "counter", "batches_with_same_bits", "Checks that found the same bits in a batch as alone."
    ),
    Family(
        "counter", "batches_with_other_bits", "Checks that found other bits in a batch than alone."
    ),
    # the statistics of the Open Inference Protocol
    Family("counter", "last_inference_ms", labels=("model",)),
    Family("counter", "failures", labels=("model",)),
    Family("counter", "failure_seconds", labels=("model",)),
    Family("counter", "shared_seconds", labels=("model", "stage")),
    Family("counter", "batches", labels=("model", "size", "cell")),
    # the state of processes, which all of them and the supervisor read
    Family("gauge", "requests_in_progress", "Requests to run a variant without a response."),
    Family("gauge", "connections", "Open connections."),
    Family("gauge", "queue_depth", "Requests in the queue."),
    Family("gauge", "queue_bytes", "Bytes of input and output tensors in the queue."),
    Family("gauge", "queued_work", labels=("device",)),
    Family("gauge", "memory_allocated"),
    Family("gauge", "memory_reserved"),
    Family("gauge", "memory_total"),
    Family("gauge", "heartbeat"),  # last time its event loop ran; 0: not started
    Family("gauge", "busy_since"),  # start of the batch that its device runs; 0: idle
    Family("gauge", "pid"),  # id of the process; 0: not started
    Family("gauge", "ready"),  # 1: accepts requests or jobs
    Family("gauge", "was_ready"),  # 1: has accepted some since it started
    Family("counter", "starts"),
)
