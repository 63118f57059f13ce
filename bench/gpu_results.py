"""Results of bench/on_gpu.py, one class for each table."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BitsResult",
    "GpuResults",
    "MemoryResult",
    "OverlapResult",
    "RateResult",
    "SuiteResult",
    "WaitsResult",
]


class BitsResult(NamedTuple):
    """Requests that ran alone and in batches of several sizes.

    Attributes:
        variant: its name.
        kind: name of the kind of run.
        dtype: of the inputs.
        same: by size of the batch: requests with the same bits as alone.
        total: by size of the batch: requests.
        error: the message of an error that ended the runs.
    """

    variant: str
    kind: str
    dtype: str
    same: dict[int, int]
    total: dict[int, int]
    error: str = ""


class RateResult(NamedTuple):
    """Requests per second of one size and dtype, one number for each try.

    Attributes:
        shape: key of `SHAPES`.
        dtype: of the inputs.
        engine: of an engine with many requests at the same time.
        batch_size: mean size of its batches.
        bare: of torch's own attention, one request for each call.
        bare_stacked: of the same, with as many requests in a call as a batch may have.
    """

    shape: str
    dtype: str
    engine: list[float]
    batch_size: float
    bare: list[float]
    bare_stacked: list[float]


class OverlapResult(NamedTuple):
    """Milliseconds of a batch, one number for each try.

    Attributes:
        shape: key of `SHAPES`.
        batch_size: requests in a batch.
        sequential: each batch ends before the next one begins.
        overlapped: each batch begins before the previous one ends.
        compute: the computation alone, between two events of the device.
        has_same_bits: all runs of the batch have the same bits.
    """

    shape: str
    batch_size: int
    sequential: list[float]
    overlapped: list[float]
    compute: list[float]
    has_same_bits: bool


class WaitsResult(NamedTuple):
    """Waits of the host for one batch.

    Attributes:
        variant: its name.
        kind: name of the kind of run.
        waits: for events, as the device counts them.
        hidden: those that torch causes; None where torch counts none.
        stacked: requests that shared a call.
    """

    variant: str
    kind: str
    waits: int
    hidden: int | None
    stacked: int


class MemoryResult(NamedTuple):
    """A request that is larger than the memory of the device, among others.

    Attributes:
        needed_bytes: that its outputs need.
        total_bytes: of the device.
        error: name of the class of the error that its client gets; empty: none.
        others: requests that were queued behind it.
        right: those of them with a right output.
    """

    needed_bytes: int
    total_bytes: int
    error: str
    others: int
    right: int


class SuiteResult(NamedTuple):
    """The tests marked `gpu`: their counts, and the names of those that failed."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]


class GpuResults(NamedTuple):
    """All results of one run."""

    tests: SuiteResult | None
    bits: list[BitsResult]
    rates: list[RateResult]
    overlaps: list[OverlapResult]
    waits: list[WaitsResult]
    memory: MemoryResult
