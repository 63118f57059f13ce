"""Tables of docs/gpu.md from the results of bench/on_gpu.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

from gpu_results import (
    BitsResult,
    GpuResults,
    MemoryResult,
    OverlapResult,
    RateResult,
    SuiteResult,
    WaitsResult,
)
from run_page import format_number, format_table

__all__ = ["BEGIN", "END", "PAGE", "build_text", "write_page"]

PAGE: Final = Path(__file__).parent.parent / "docs/gpu.md"
BEGIN: Final = "<!-- made by `make gpu` -->\n"
END: Final = "<!-- end -->\n"


def write_page(text: str) -> None:
    """Writes the text between its marks; the hand-written text around them stays."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text.strip()}\n{END}{rest.split(END, 1)[1]}")


def build_text(about: str, results: GpuResults) -> str:
    """Returns all tables with their headings.

    Args:
        about: the device, the versions and the warm-up.
        results: of one run.
    """
    parts = {
        "Tests": _build_tests(results.tests),
        "Bits": _build_bits(results.bits),
        "Requests per second": _build_rates(results.rates),
        "Copies": _build_overlaps(results.overlaps),
        "Waits": _build_waits(results.waits),
        "Out of memory": _build_memory(results.memory),
    }
    return "\n\n".join([about, *(f"### {name}\n\n{text}" for name, text in parts.items())])


def _build_tests(result: SuiteResult | None) -> str:
    if result is None:
        return "The tests did not run."
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped."
    return "\n".join([f"`pytest -m gpu`: {counts}", *(f"- `{name}`" for name in result.failures)])


def _build_bits(results: list[BitsResult]) -> str:
    """Returns a row for each variant and kind of run, a column for each dtype."""
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    cells = {(r.variant, r.kind, r.dtype): _format_bits(r) for r in results}
    rows = [
        [f"`{variant}`", kind, *(cells[variant, kind, dtype] for dtype in dtypes)]
        for variant, kind in dict.fromkeys((r.variant, r.kind) for r in results)
    ]
    lines = [
        "Requests with the same bits in a batch as alone, of all requests. "
        "Brackets hold the sizes of batches with other bits.",
        "",
        format_table(["variant", "run", *dtypes], rows, labels=2),
    ]
    errors = dict.fromkeys(f"- {r.dtype}: {r.error}" for r in results if r.error)
    return "\n".join([*lines, *([""] if errors else []), *errors])


def _format_bits(result: BitsResult) -> str:
    if result.error:
        return "error"
    if not (total := sum(result.total.values())):
        return "never in a batch"
    different = [str(size) for size, count in result.total.items() if result.same[size] < count]
    sizes = f" ({', '.join(different)})" if different else ""
    return f"{sum(result.same.values())} / {total}{sizes}"


def _build_rates(results: list[RateResult]) -> str:
    header = ["size", "dtype", "engine, requests/s", "requests in a batch"]
    header += ["bare, requests/s", "engine / bare", "bare in batches", "engine / bare in batches"]
    rows = [
        [
            result.shape,
            result.dtype,
            _format_spread(result.engine),
            format_number(result.batch_size),
            _format_spread(result.bare),
            _format_ratio(result.engine, result.bare),
            _format_spread(result.bare_stacked),
            _format_ratio(result.engine, result.bare_stacked),
        ]
        for result in results
    ]
    note = "The median of all tries, and the least and the largest in brackets."
    return f"{note}\n\n{format_table(header, rows, labels=2)}"


def _build_overlaps(results: list[OverlapResult]) -> str:
    header = ["size", "requests in a batch", "one after the other, ms", "overlapped, ms", "ratio"]
    header += ["computation alone, ms", "same bits"]
    rows = [
        [
            result.shape,
            str(result.batch_size),
            _format_spread(result.sequential),
            _format_spread(result.overlapped),
            _format_ratio(result.overlapped, result.sequential),
            _format_spread(result.compute),
            "yes" if result.has_same_bits else "no",
        ]
        for result in results
    ]
    return f"Milliseconds of a batch.\n\n{format_table(header, rows)}"


def _build_waits(results: list[WaitsResult]) -> str:
    rows = [
        [
            f"`{result.variant}`",
            result.kind,
            str(result.stacked),
            str(result.waits),
            "not counted" if result.hidden is None else str(result.hidden),
        ]
        for result in results
    ]
    header = ["variant", "run", "requests in the call", "waits for outputs", "hidden waits"]
    return f"Waits of the host for one batch.\n\n{format_table(header, rows, labels=2)}"


def _build_memory(result: MemoryResult) -> str:
    needed, total = (
        f"{size / 2**30:,.1f} GiB" for size in (result.needed_bytes, result.total_bytes)
    )
    return (
        f"A request for {needed} of weights, on a device of {total}: "
        f"`{result.error or 'no error'}`. "
        f"Requests behind it with a right output: {result.right} of {result.others}."
    )


def _format_spread(values: list[float]) -> str:
    """Formats the median, and the least and the largest value in brackets."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{format_number(median)} ({format_number(least)}–{format_number(most)})"


def _format_ratio(values: list[float], others: list[float]) -> str:
    return _format_spread([a / b for a, b in zip(values, others, strict=True)])
