"""Runs, comparisons and conversions in this process: a message in, a message or JSON out."""

from __future__ import annotations

from typing import Any, Final

import torch

from qkv import catalogue, findings
from qkv.comparison import Comparison
from qkv.conversion import convert_message
from qkv.gradient import GradientJob
from qkv.job import Job, Limits
from qkv.message import Message
from qkv.run import run

__all__ = ["attend", "compare", "convert_message", "gradients", "variants"]

_UNLIMITED: Final = Limits(answer=1 << 62, request=1 << 62)


def attend(variant: str, message: Message) -> Message:
    """Runs a variant on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    return _run(Job.of(variant, message, _UNLIMITED), "outputs")


def gradients(variant: str, message: Message) -> Message:
    """The gradients of a variant, on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    return _run(GradientJob.of(variant, message, _UNLIMITED), "gradients")


def _run(job: Job, group: str) -> Message:
    ran = run([job], torch.device("cpu"), stack=False)[0]
    timing = {
        "compute_ms": ran.compute_s * 1e3,
        "device": "cpu",
        "backend": ran.backend,
        "flops": job.flops,
        "bytes": job.bytes_in + job.bytes_out,
    }
    fields = {"variant": job.variant.name, group: None, **job.marks, "timing": timing}
    return Message(fields, ran.outputs)


def compare(message: Message) -> dict[str, Any]:
    """Compares variants on the CPU.

    Raises:
        QkvError: as the service would answer.
    """
    steps, timing = (
        findings.compare(Comparison(message, _UNLIMITED)),
        {"compute_ms": 0.0, "runs": 0},
    )
    try:
        job = next(steps)
        while True:
            ran = run([job], torch.device("cpu"), stack=False)[0]
            timing["compute_ms"] += ran.compute_s * 1e3
            timing["runs"] += 1
            job = steps.send((ran.outputs, ran.compute_s * 1e3))
    except StopIteration as end:
        body: dict[str, Any] = end.value
        return body | {"timing": timing | {"device": "cpu"}}


def variants() -> list[dict[str, Any]]:
    """The catalogue."""
    return [v.describe() for v in catalogue.variants().values()]
