"""Measures single batches on an accelerator: bits, waits of the host, overlap of the copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bodies import SHAPES
from gpu_jobs import KINDS, Kind, build_jobs, kinds_of

from qkv.attention.catalogue import variants
from qkv.engine.device.accelerator import Accelerator
from qkv.engine.executor import execute, launch
from qkv.jobs.job import Job
from qkv.jobs.result import Result
from qkv.tensors import FLOATING
from support.hidden_waits import count_hidden_waits

_WAITS_BATCH: Final = 8


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


def bits_of(output: Any) -> dict[str, bytes]:
    """Returns the bytes of each output of a `Result`."""
    return {name: bytes(raw.data) for name, raw in output.outputs.items()}


def measure_bits(
    device: Accelerator, batch_sizes: Mapping[str, Sequence[int]], dtypes: Sequence[str] = FLOATING
) -> Iterator[BitsResult]:
    """Compares requests alone and in batches, for each variant, kind of run and dtype.

    Args:
        device: runs them.
        batch_sizes: by key of `SHAPES`; weights and gradients leave out the last one, L.
        dtypes: of the inputs.
    """
    for variant in variants().values():
        for kind in kinds_of(variant):
            shapes = {s: n for s, n in batch_sizes.items() if kind is KINDS[0] or s != "L"}
            for dtype in dtypes:
                yield _compare_bits(device, variant.name, kind, dtype, shapes)


def _compare_bits(
    device: Accelerator,
    variant: str,
    kind: Kind,
    dtype: str,
    shapes: Mapping[str, Sequence[int]],
) -> BitsResult:
    sizes = sorted({size for sizes in shapes.values() for size in sizes})
    same, total = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    try:
        for shape, batch_sizes in shapes.items():
            jobs = build_jobs(variant, max(batch_sizes), SHAPES[shape], dtype, kind)
            if len({job.batch_key for job in jobs}) > 1:
                continue  # these requests never share a batch
            alone = [bits_of(execute([job], device, stack=True)[0]) for job in jobs]
            for size in batch_sizes:
                outputs = execute(jobs[:size], device, stack=True)
                pairs = zip(outputs, alone[:size], strict=True)
                same[size] += sum([bits_of(output) == own for output, own in pairs])
                total[size] += size
    except (RuntimeError, TypeError) as error:  # a device may lack a dtype, or memory
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        return BitsResult(variant, kind.name, dtype, same, total, message)
    return BitsResult(variant, kind.name, dtype, same, total)


def measure_waits(device: Accelerator, shape: str = "S") -> Iterator[WaitsResult]:
    """Counts how often the host waits for a batch, for each variant and kind of run."""
    for variant in variants().values():
        for kind in kinds_of(variant):
            jobs = build_jobs(variant.name, _WAITS_BATCH, SHAPES[shape], kind=kind)
            jobs = [job for job in jobs if job.batch_key == jobs[0].batch_key]
            execute(jobs, device, stack=True)  # torch sets up its libraries
            before = device.synchronizations
            outputs, hidden = count_hidden_waits(
                device.torch_device,
                lambda jobs=jobs: execute(jobs, device, stack=True),  # type: ignore[misc]
            )
            waits, stacked = device.synchronizations - before, outputs[0].times.stacked_count
            yield WaitsResult(variant.name, kind.name, waits, hidden, stacked)


def measure_overlap(
    device: Accelerator, shape: str, batch_size: int, batches: int = 8, tries: int = 5
) -> OverlapResult:
    """Times batches that begin before the previous one ends, and others one after the other.

    Both take turns, so that a slow moment of the machine affects both. One turn is the warm-up.
    """
    jobs = build_jobs("softmax", batch_size, SHAPES[shape])
    times: list[tuple[float, float, float]] = []
    has_same_bits = True
    for _ in range(tries + 1):
        started_at = time.perf_counter()
        first = [execute(jobs, device, stack=True) for _ in range(batches)]
        between = time.perf_counter()
        second = _run_ahead(jobs, device, batches)
        ended_at = time.perf_counter()
        compute_s = statistics.median([outputs[0].times.compute_s for outputs in first])
        each = 1e3 / batches
        times.append(((between - started_at) * each, (ended_at - between) * each, compute_s * 1e3))
        has_same_bits = has_same_bits and _have_same_bits([*first, *second])
    sequential, overlapped, compute = map(list, zip(*times[1:], strict=True))
    return OverlapResult(shape, batch_size, sequential, overlapped, compute, has_same_bits)


def _run_ahead(jobs: Sequence[Job], device: Accelerator, batches: int) -> list[list[Result]]:
    """Runs a batch several times, as the engine does: it begins one, then finishes the previous."""
    previous, outputs = launch(jobs, device, stack=True), []
    for _ in range(batches - 1):
        following = launch(jobs, device, stack=True)
        outputs.append(previous())
        previous = following
    return [*outputs, previous()]


def _have_same_bits(runs: Sequence[list[Result]]) -> bool:
    """Returns True if all runs of a batch have the same bits."""
    first, *others = ([bits_of(output) for output in outputs] for outputs in runs)
    return all(other == first for other in others)
