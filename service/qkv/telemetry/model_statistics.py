"""The statistics of a model, in the form of Triton's statistics extension.

The Open Inference Protocol calls a variant a model, and a loaded layer another one. A run of a
layer counts for its variant too.
"""

from __future__ import annotations

from typing import Any

from qkv.telemetry.counters import Counters
from qkv.telemetry.families import STAGES


def triton_statistics(counters: Counters, name: str) -> dict[str, Any]:
    """Returns the sums of all processes: durations in nanoseconds, and the time of the last
    inference in milliseconds since 1970."""
    model = counters.labels["model"].index(name)
    sizes = counters.total("batches")[model]
    batches = [(size, *row) for size, row in enumerate(sizes.tolist(), start=1) if row[0]]
    inferences = sum(size * int(count) for size, count, *_ in batches)
    success, queue, *stages = sizes[:, 1:].sum(0)
    seconds = {"queue": queue}
    for stage, own, shared in zip(
        STAGES, stages, counters.total("shared_seconds")[model], strict=True
    ):
        seconds[stage] = own + shared
    failures, failure_s = (counters.total(of)[model] for of in ("failures", "failure_seconds"))
    return {
        "last_inference": int(counters.rows["last_inference_ms"][:, model].max()),
        "inference_count": inferences,
        "execution_count": sum(int(count) for _, count, *_ in batches),
        "inference_stats": {
            "success": _count_and_ns(inferences, success),
            "fail": _count_and_ns(failures, failure_s),
        }
        | {stage: _count_and_ns(inferences, total_s) for stage, total_s in seconds.items()},
        "batch_stats": [
            {"batch_size": size}
            | {stage: _count_and_ns(count, s) for stage, s in zip(STAGES, each, strict=True)}
            for size, count, _, _, *each in batches
        ],
    }


def _count_and_ns(count: float, seconds: float) -> dict[str, int]:
    return {"count": int(count), "ns": round(seconds * 1e9)}
