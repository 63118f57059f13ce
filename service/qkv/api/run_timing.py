"""The times of a run in a response: the field `timing`, and the header Server-Timing."""

from __future__ import annotations

from typing import Any

from qkv.api.request_record import Header
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.telemetry.times import Times


def timing_fields(result: Result, plan: Plan) -> dict[str, Any]:
    """Returns the fields of the `Timing` of a run: times in milliseconds, and its size."""
    times = result.times
    return {
        "queue_ms": times.queue_s * 1e3,
        "transfer_ms": times.transfer_s * 1e3,
        "compute_ms": times.compute_s * 1e3,
        "total_ms": times.total_s * 1e3,
        "batch_size": result.batch_size,
        "device": result.device,
        "backend": result.backend,
        "flops": plan.flops,
        "bytes": plan.bytes,
    }


def server_timing(times: Times) -> Header:
    """Returns the header Server-Timing (W3C), in milliseconds."""
    milliseconds = (
        times.queue_s * 1e3,
        times.transfer_s * 1e3,
        times.compute_s * 1e3,
        times.total_s * 1e3,
    )
    return (
        b"server-timing",
        b"queue;dur=%.4f, transfer;dur=%.4f, compute;dur=%.4f, total;dur=%.4f" % milliseconds,
    )
