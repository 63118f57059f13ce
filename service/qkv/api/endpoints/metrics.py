"""GET /metrics: what all workers have counted, in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from fastapi import APIRouter, Response

from qkv.telemetry.metrics import BUCKETS, HISTOGRAMS, OTHER
from qkv.telemetry.worker_state import SharedState
from qkv.version import __version__

__all__ = ["TEXT_TYPE", "exposition", "router"]

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_BATCH_SIZES: Final = tuple(1 << i for i in range(13))  # as far as QKV_MAX_BATCH goes
_HISTOGRAM_HELP: Final = {
    "request_duration": "From a request's headers to the end of its answer, of those answered.",
    "queue_wait": "From when a request could run to when its turn came.",
    "compute": "The call that ran a request; those of one batch share it.",
}


def router(shared_state: SharedState, device: str) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/metrics",
        operation_id="metrics",
        summary="What all workers have counted, for Prometheus.",
    )
    async def metrics() -> Response:
        return Response(exposition(shared_state, device), headers={"Content-Type": TEXT_TYPE})

    return routes


def exposition(shared_state: SharedState, device: str) -> str:
    """All metrics. Every series is there from the start, and none is ever added."""
    page = _Page()
    page.add("build_info", "gauge", "Which version serves, on which device.")
    page.sample("build_info", 1, version=__version__, device=device)
    _add_requests(page, shared_state)
    _add_runs(page, shared_state)
    _add_gauges(page, shared_state)
    return page.text


class _Page:
    """Families of samples, as they are written."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)

    def add(self, name: str, kind: str, help_text: str) -> None:
        """Begins a family."""
        self._lines += (f"# HELP qkv_{name} {help_text}", f"# TYPE qkv_{name} {kind}")

    def sample(self, name: str, value: float, **labels: str) -> None:
        """A sample of the family that was begun last; no label here needs an escape."""
        label_text = ",".join(f'{label}="{text}"' for label, text in labels.items())
        label_part = f"{{{label_text}}}" if label_text else ""
        self._lines.append(f"qkv_{name}{label_part} {_number(value)}")

    def one(self, name: str, kind: str, help_text: str, value: float) -> None:
        """A family of one sample."""
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
        """A histogram of a variant; `counts` are those of each bucket, the last without a bound."""
        edges = [*map(_number, bounds), "+Inf"]
        for edge, below in zip(edges, accumulate(counts), strict=True):
            self.sample(f"{name}_bucket", below, variant=variant, le=edge)
        self.sample(f"{name}_sum", total, variant=variant)
        self.sample(f"{name}_count", sum(counts), variant=variant)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _add_requests(page: _Page, shared_state: SharedState) -> None:
    requests, totals = shared_state.metrics.requests, shared_state.metrics.totals
    page.add("requests_total", "counter", "Requests to run a variant, by what became of them.")
    for variant, outcomes in requests.items():
        if variant != OTHER:
            for outcome, count in outcomes.items():
                page.sample("requests_total", count, variant=variant, outcome=outcome)
    page.add("other_requests_total", "counter", "Requests for all else.")
    for outcome, count in requests[OTHER].items():
        page.sample("other_requests_total", count, outcome=outcome)
    page.add("rejected_total", "counter", "Requests of any kind that were not answered, by reason.")
    for reason in requests[OTHER]:
        if reason != "ok":
            count = sum(outcomes[reason] for outcomes in requests.values())
            page.sample("rejected_total", count, reason=reason)
    for name, help_text in (
        ("request_body_bytes", "Bytes of bodies that came."),
        ("response_body_bytes", "Bytes of bodies that went."),
        ("log_lines_dropped", "Lines of the request log that could not be written in time."),
    ):
        page.one(f"{name}_total", "counter", help_text, totals[name])


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
    page.add("batch_size", "histogram", "Requests that ran together; gradients are not counted.")
    for variant, batch_stats in batches.items():
        counts, total = [0] * (len(_BATCH_SIZES) + 1), 0
        for batch in batch_stats:
            size, count = batch["batch_size"], batch["compute_infer"]["count"]
            counts[sum(bound < size for bound in _BATCH_SIZES)] += count
            total += size * count
        page.histogram("batch_size", _BATCH_SIZES, counts, total, variant)
    help_text = (
        "Seconds that the device has computed, once for each batch; gradients are not counted."
    )
    page.add("device_seconds_total", "counter", help_text)
    for variant, batch_stats in batches.items():
        seconds = sum(batch["compute_infer"]["ns"] for batch in batch_stats) / 1e9
        page.sample("device_seconds_total", seconds, variant=variant)


def _add_gauges(page: _Page, shared_state: SharedState) -> None:
    rows, usage = shared_state.worker_rows, shared_state.usage
    for name, help_text, value in (
        (
            "requests_in_progress",
            "Requests to run a variant that are not answered.",
            shared_state.in_flight,
        ),
        ("queue_depth", "Requests that wait for the device.", usage.queued_count),
        ("queue_bytes", "Bytes of tensors, in and out, of those.", usage.queued_bytes),
        ("connections", "Open connections.", int(rows["connections"].sum())),
        ("workers", "Worker processes.", len(shared_state)),
        ("workers_ready", "Those of them that take requests.", int(rows["ready"].sum())),
    ):
        page.one(name, "gauge", help_text, value)
    for name, help_text, value in (
        ("allocated", "Bytes of the device's memory that tensors hold.", usage.allocated_bytes),
        (
            "reserved",
            "Bytes of it that the service holds, for tensors to come too.",
            usage.reserved_bytes,
        ),
        ("total", "Bytes of it that there are.", usage.total_bytes),
    ):
        page.add(f"device_memory_{name}_bytes", "gauge", help_text)
        if usage.total_bytes:  # a CPU's memory is not counted
            page.sample(f"device_memory_{name}_bytes", value)
