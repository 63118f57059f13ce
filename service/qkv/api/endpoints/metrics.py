"""GET /metrics: the metrics of all workers, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from fastapi import APIRouter, Response

from qkv.api.openapi.operation import problem_responses
from qkv.telemetry.metrics import BUCKETS, HISTOGRAMS, OTHER, Usage
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__

__all__ = ["TEXT_TYPE", "exposition", "router"]

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_BATCH_SIZES: Final = tuple(1 << i for i in range(13))  # up to the largest QKV_MAX_BATCH
_HISTOGRAM_HELP: Final = {
    "request_duration": "From the headers of a request to the end of its response.",
    "queue_wait": "From the submission of a job to its start.",
    "compute": "The call that ran a job; jobs of one batch share it.",
}


def router(shared_state: SharedState, device: str) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/metrics",
        operation_id="metrics",
        summary="Metrics of all workers, for Prometheus.",
        response_class=Response,
        responses={
            200: {
                "description": "Metrics in the text format 0.0.4 of Prometheus.",
                "content": {TEXT_TYPE: {"schema": {"type": "string"}}},
            },
            **problem_responses(500, 503),
        },
    )
    async def metrics() -> Response:
        return Response(exposition(shared_state, device), headers={"Content-Type": TEXT_TYPE})

    return routes


def exposition(shared_state: SharedState, device: str) -> str:
    """Returns all metrics. Every series exists from the start."""
    page = _Page()
    page.add("build_info", "gauge", "The version and the device of the service.")
    page.sample("build_info", 1, version=__version__, device=device)
    _add_requests(page, shared_state)
    _add_keys(page, shared_state)
    _add_runs(page, shared_state)
    _add_layers(page, shared_state)
    _add_gauges(page, shared_state)
    _add_device_processes(page, shared_state)
    _add_process_usage(page, shared_state)
    return page.text


class _Page:
    """The text of the metrics, family by family."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)

    def add(self, name: str, kind: str, help_text: str) -> None:
        """Starts a family."""
        name = _full(name)
        self._lines += (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}")

    def sample(self, name: str, value: float, **labels: str) -> None:
        """Adds a sample to the last family. Its labels need no escapes."""
        label_text = ",".join(f'{label}="{text}"' for label, text in labels.items())
        label_part = f"{{{label_text}}}" if label_text else ""
        self._lines.append(f"{_full(name)}{label_part} {_number(value)}")

    def one(self, name: str, kind: str, help_text: str, value: float) -> None:
        """Adds a family of one sample."""
        self.add(name, kind, help_text)
        self.sample(name, value)

    def histogram(
        self,
        name: str,
        bounds: Sequence[float],
        counts: Sequence[float],
        total: float,
        variant: str,
    ) -> None:
        """Adds a histogram of a variant; the last of `counts` is the unbounded bucket."""
        edges = [*map(_number, bounds), "+Inf"]
        for edge, below in zip(edges, accumulate(counts), strict=True):
            self.sample(f"{name}_bucket", below, variant=variant, le=edge)
        self.sample(f"{name}_sum", total, variant=variant)
        self.sample(f"{name}_count", sum(counts), variant=variant)


def _full(name: str) -> str:
    """Returns the name of a metric. Prometheus defines those that begin with `process_`."""
    return name if name.startswith("process_") else f"qkv_{name}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _add_requests(page: _Page, shared_state: SharedState) -> None:
    requests, totals = shared_state.metrics.requests, shared_state.metrics.totals
    page.add("requests_total", "counter", "Requests to run a variant, by outcome.")
    for variant, outcomes in requests.items():
        if variant != OTHER:
            for outcome, count in outcomes.items():
                page.sample("requests_total", count, variant=variant, outcome=outcome)
    page.add("other_requests_total", "counter", "All other requests.")
    for outcome, count in requests[OTHER].items():
        page.sample("other_requests_total", count, outcome=outcome)
    page.add("rejected_total", "counter", "Requests with an error as the response, by error.")
    for reason in requests[OTHER]:
        if reason != "ok":
            count = sum(outcomes[reason] for outcomes in requests.values())
            page.sample("rejected_total", count, reason=reason)
    for name, help_text in (
        ("request_body_bytes", "Bytes of request bodies."),
        ("response_body_bytes", "Bytes of response bodies."),
        ("log_lines_dropped", "Lines of the request log that were dropped."),
        ("batches_with_same_bits", "Checks that found the same bits in a batch as alone."),
        ("batches_with_other_bits", "Checks that found other bits in a batch than alone."),
    ):
        page.one(f"{name}_total", "counter", help_text, totals[name])


def _add_keys(page: _Page, shared_state: SharedState) -> None:
    """Adds what each API key has used; without keys, the families are empty."""
    totals = shared_state.metrics.key_usage.totals
    for place, (name, help_text) in enumerate(
        (
            ("requests_total", "Requests of the API key."),
            ("rejected_total", "Requests of the API key beyond its share of the queue."),
            ("compute_seconds_total", "Compute time of its requests, in seconds."),
        )
    ):
        page.add(f"key_{name}", "counter", help_text)
        for key, used in totals.items():
            page.sample(f"key_{name}", used[place], key=key)


def _add_runs(page: _Page, shared_state: SharedState) -> None:
    variants = shared_state.metrics.variants
    for name in HISTOGRAMS:
        page.add(f"{name}_seconds", "histogram", _HISTOGRAM_HELP[name])
        for variant in variants:
            counts, total = shared_state.metrics.histogram(variant, name)
            page.histogram(f"{name}_seconds", BUCKETS, counts, total, variant)
    batches = {
        variant: shared_state.models.statistics(variant)["batch_stats"] for variant in variants
    }
    page.add("batch_size", "histogram", "Requests in a batch, without gradients.")
    for variant, batch_stats in batches.items():
        counts, total = [0] * (len(_BATCH_SIZES) + 1), 0
        for batch in batch_stats:
            size, count = batch["batch_size"], batch["compute_infer"]["count"]
            counts[sum(bound < size for bound in _BATCH_SIZES)] += count
            total += size * count
        page.histogram("batch_size", _BATCH_SIZES, counts, total, variant)
    help_text = "Compute time of the device in seconds, once for each batch, without gradients."
    page.add("device_seconds_total", "counter", help_text)
    for variant, batch_stats in batches.items():
        seconds = sum(batch["compute_infer"]["ns"] for batch in batch_stats) / 1e9
        page.sample("device_seconds_total", seconds, variant=variant)


def _add_layers(page: _Page, shared_state: SharedState) -> None:
    """Adds what differs between loaded layers; without any, the families are empty."""
    layers = shared_state.metrics.layers
    page.add("layer_runs_total", "counter", "Runs of a loaded layer.")
    for name, (runs, _) in layers.items():
        page.sample("layer_runs_total", runs, layer=name)
    help_text = "The calls that ran a loaded layer; jobs of one batch share them."
    page.add("layer_compute_seconds_total", "counter", help_text)
    for name, (_, seconds) in layers.items():
        page.sample("layer_compute_seconds_total", seconds, layer=name)


def _add_gauges(page: _Page, shared_state: SharedState) -> None:
    rows, usage = shared_state.worker_rows, shared_state.usage
    for name, help_text, value in (
        (
            "requests_in_progress",
            "Requests to run a variant without a response.",
            shared_state.in_flight,
        ),
        ("queue_depth", "Requests in the queue.", usage.queued_count),
        ("queue_bytes", "Bytes of input and output tensors in the queue.", usage.queued_bytes),
        ("connections", "Open connections.", int(rows["connections"].sum())),
        ("workers", "Worker processes.", len(shared_state)),
        ("workers_ready", "Worker processes that accept requests.", int(rows["ready"].sum())),
    ):
        page.one(name, "gauge", help_text, value)
    for name, help_text, value in (
        ("allocated", "Bytes of device memory that tensors use.", usage.allocated_bytes),
        (
            "reserved",
            "Bytes of device memory that the allocator has reserved.",
            usage.reserved_bytes,
        ),
        ("total", "Bytes of device memory.", usage.total_bytes),
    ):
        page.add(f"device_memory_{name}_bytes", "gauge", help_text)
        if usage.total_bytes:  # 0 on a CPU
            page.sample(f"device_memory_{name}_bytes", value)


def _add_device_processes(page: _Page, shared_state: SharedState) -> None:
    """Adds what differs between device processes; without any, the families are empty."""
    rows, first = shared_state.device_rows, len(shared_state)
    usages = [dict(zip(Usage._fields, row, strict=True)) for row in rows["usage"].tolist()]
    ran = [shared_state.models.process_totals(first + i) for i in range(len(rows))]
    gauge, counter = "gauge", "counter"
    for name, kind, help_text, values in (
        ("up", gauge, "1 while the device process accepts jobs.", rows["ready"].tolist()),
        (
            "restarts_total",
            counter,
            "Restarts of the device process.",
            shared_state.device_restarts,
        ),
        (
            "queue_depth",
            gauge,
            "Requests in the queue of the device process.",
            [usage["queued_count"] for usage in usages],
        ),
        (
            "requests_total",
            counter,
            "Requests that the device process ran, without gradients.",
            [count for count, _ in ran],
        ),
        (
            "seconds_total",
            counter,
            "Compute time in seconds, once for each batch, without gradients.",
            [seconds for _, seconds in ran],
        ),
        (
            "memory_reserved_bytes",
            gauge,
            "Bytes of device memory that the device process has reserved.",
            [usage["reserved_bytes"] for usage in usages],
        ),
    ):
        page.add(f"device_process_{name}", kind, help_text)
        for number, (device, value) in enumerate(zip(shared_state.devices, values, strict=True)):
            page.sample(f"device_process_{name}", value, process=str(number), device=device)


def _add_process_usage(page: _Page, shared_state: SharedState) -> None:
    """Adds the metrics that Prometheus's own clients have, for all processes of the service."""
    if (usage := shared_state.process_usage) is None:
        return
    for name, kind, help_text, value in (
        ("cpu_seconds_total", "counter", "User and system CPU time.", usage.cpu_seconds),
        (
            "resident_memory_bytes",
            "gauge",
            "Resident memory; each process counts the pages that it shares.",
            usage.resident_bytes,
        ),
        ("virtual_memory_bytes", "gauge", "Virtual memory.", usage.virtual_bytes),
        ("open_fds", "gauge", "Open file descriptors of the process with most.", usage.open_files),
        ("max_fds", "gauge", "Limit of open file descriptors of a process.", usage.max_files),
        (
            "start_time_seconds",
            "gauge",
            "Start of the service in seconds since 1970.",
            usage.start_time,
        ),
    ):
        page.one(f"process_{name}", kind, help_text, value)
