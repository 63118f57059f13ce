"""The times of a run in a response: the field `timing`, and the header Server-Timing."""

from __future__ import annotations

from typing import Any

from qkv.api.request_headers import Header
from qkv.engine.result import Result, Times
from qkv.jobs.plan import Plan

__all__ = ["server_timing", "timing_fields"]


def timing_fields(result: Result, plan: Plan) -> dict[str, Any]:
    """Returns what a response says of a run: times in milliseconds, and its size."""
    queue_s, transfer_s, compute_s, total_s = result.times
    return {
        "queue_ms": queue_s * 1e3,
        "transfer_ms": transfer_s * 1e3,
        "compute_ms": compute_s * 1e3,
        "total_ms": total_s * 1e3,
        "batch_size": result.batch_size,
        "device": result.device,
        "backend": result.backend,
        "flops": plan.flops,
        "bytes": plan.bytes,
    }


def server_timing(times: Times) -> Header:
    """Returns the header Server-Timing (W3C), in milliseconds."""
    queue_s, transfer_s, compute_s, total_s = times
    return (
        b"server-timing",
        b"queue;dur=%.4f, transfer;dur=%.4f, compute;dur=%.4f, total;dur=%.4f"
        % (queue_s * 1e3, transfer_s * 1e3, compute_s * 1e3, total_s * 1e3),
    )
