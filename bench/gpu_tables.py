"""Tables of bench/results/gpu.md from the results of bench/on_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_batches import BitsResult, OverlapResult, WaitsResult
from gpu_engine import MemoryResult, RateResult
from tables import Cell, Table, spread


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


def build_tables(results: GpuResults) -> list[Table]:
    """Returns the tables in the order of the page."""
    return [
        Table("tests", [], [], note=_describe_tests(results.tests)),
        _build_bits(results.bits),
        Table(
            "requests per second",
            ["size", "dtype", "engine, requests/s", "requests in a batch", "bare, requests/s",
             "engine / bare", "bare in batches", "engine / bare in batches"],
            [
                [r.shape, r.dtype, spread(r.engine), r.batch_size, spread(r.bare),
                 _ratios(r.engine, r.bare), spread(r.bare_stacked),
                 _ratios(r.engine, r.bare_stacked)]
                for r in results.rates
            ],
            labels=2,
        ),
        Table(
            "copies",
            ["size", "requests in a batch", "one after the other, ms", "overlapped, ms", "ratio",
             "computation alone, ms", "same bits"],
            [
                [r.shape, r.batch_size, spread(r.sequential), spread(r.overlapped),
                 _ratios(r.overlapped, r.sequential), spread(r.compute),
                 "yes" if r.has_same_bits else "no"]
                for r in results.overlaps
            ],
        ),
        Table(
            "waits",
            ["variant", "run", "requests in the call", "waits for outputs", "hidden waits"],
            [
                [f"`{r.variant}`", r.kind, r.stacked, r.waits,
                 "not counted" if r.hidden is None else r.hidden]
                for r in results.waits
            ],
            labels=2,
        ),
        Table("out of memory", [], [], note=_describe_memory(results.memory)),
    ]  # fmt: skip


def _describe_tests(result: SuiteResult | None) -> str:
    if result is None:
        return "The tests did not run."
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped."
    return "\n".join([f"`pytest -m gpu`: {counts}", *(f"- `{name}`" for name in result.failures)])


def _build_bits(results: Sequence[BitsResult]) -> Table:
    """Returns a row for each variant and kind of run, a column for each dtype."""
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    cells = {(r.variant, r.kind, r.dtype): _format_bits(r) for r in results}
    rows = [
        [f"`{variant}`", kind, *(cells[variant, kind, dtype] for dtype in dtypes)]
        for variant, kind in dict.fromkeys((r.variant, r.kind) for r in results)
    ]
    errors = dict.fromkeys(f"- {r.dtype}: {r.error}" for r in results if r.error)
    return Table("bits", ["variant", "run", *dtypes], rows, labels=2, note="\n".join(errors))


def _format_bits(result: BitsResult) -> str:
    if result.error:
        return "error"
    if not (total := sum(result.total.values())):
        return "never in a batch"
    different = [str(size) for size, count in result.total.items() if result.same[size] < count]
    sizes = f" ({', '.join(different)})" if different else ""
    return f"{sum(result.same.values())} / {total}{sizes}"


def _ratios(values: Sequence[float], others: Sequence[float]) -> Cell:
    return spread([a / b for a, b in zip(values, others, strict=True)])


def _describe_memory(result: MemoryResult) -> str:
    needed, total = (
        f"{size / 2**30:,.1f} GiB" for size in (result.needed_bytes, result.total_bytes)
    )
    return (
        f"A request for {needed} of weights, on a device of {total}: "
        f"`{result.error or 'no error'}`. "
        f"Requests behind it with a right output: {result.right} of {result.others}."
    )
