"""Tables of docs/performance.md from the results of bench/run.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from load import LoadResult, ResponseTiming
from service import ResidentMemory

PAGE: Final = Path(__file__).parent.parent / "docs/performance.md"
BEGIN: Final = "<!-- {} -->\n"
END: Final = "<!-- end -->\n"
_MEMORY_HEADER: Final = ["resident, MiB: before", "peak", "after"]
BARE: Final = "bare torch"
TARGET_RATIO: Final = 0.6  # of the rate of explicit attention


class OneClientResult(NamedTuple):
    """Milliseconds of the requests of one client in one format, or of the bare call."""

    shape: str
    row: str
    ms: list[float]


class ClientsResult(NamedTuple):
    """Requests in one format from several clients, and resident bytes of the service afterwards."""

    shape: str
    wire_format: str
    clients: int
    load: LoadResult
    resident_bytes: int


class WorkloadResult(NamedTuple):
    """Requests of one workload from several clients."""

    workload: str
    clients: int
    load: LoadResult


class SmallBesideLargeResult(NamedTuple):
    """Small requests from several clients, and large ones from others, alone and together."""

    clients: int
    small_alone: LoadResult
    small: LoadResult
    large_alone: LoadResult
    large: LoadResult


class ExplicitResult(NamedTuple):
    """Calls per second of explicit attention, without a service."""

    processes: int
    threads: int
    rate: float


class WeightsResult(NamedTuple):
    """Requests for output and weights in one format from several clients."""

    wire_format: str
    clients: int
    load: LoadResult


class ConnectionsResult(NamedTuple):
    """Requests over open connections: one at a time, and all at once."""

    connections: int
    sequential: LoadResult
    concurrent: LoadResult
    memory: ResidentMemory


class BodySizeResult(NamedTuple):
    """Requests with a body of one size."""

    body_bytes: int
    load: LoadResult
    memory: ResidentMemory


class BenchResults(NamedTuple):
    """All results of one run."""

    one_client: list[OneClientResult]
    clients: list[ClientsResult]
    workloads: list[WorkloadResult]
    beside_large: list[SmallBesideLargeResult]
    weights: list[WeightsResult | ExplicitResult]
    connections: list[ConnectionsResult]
    body_sizes: list[BodySizeResult]


def write_page(texts: Mapping[str, str], path: Path | None = None) -> None:
    """Writes each text between its marks; the hand-written text around them stays.

    `path` is the page; None: docs/performance.md.
    """
    path = path or PAGE
    page = path.read_text()
    for name, text in texts.items():
        begin = BEGIN.format(name)
        before, rest = page.split(begin)
        page = before + begin + text.rstrip("\n") + "\n" + END + rest.split(END, 1)[1]
    path.write_text(page)


def build_tables(about: str, results: BenchResults) -> dict[str, str]:
    """Returns the texts by the names of their marks."""
    texts = {
        "about": about,
        "bare": _build_one_client(results.one_client),
        "clients": _build_clients(results.clients),
        "workloads": _build_workloads(results.workloads),
        "small beside large": _build_beside_large(results.beside_large),
        "weights": _build_weights(results.weights),
        "connections": _build_connections(results.connections),
        "sizes": _build_body_sizes(results.body_sizes),
    }
    return {f"made by `make bench`: {name}": text for name, text in texts.items()}


def _build_one_client(results: list[OneClientResult]) -> str:
    medians = {(r.shape, r.row): statistics.median(r.ms) for r in results}
    quartiles = {(r.shape, r.row): format_quartiles(r.ms) for r in results}
    shapes = list(dict.fromkeys(r.shape for r in results))
    rows = []
    for row in dict.fromkeys(r.row for r in results):
        rows.append([row])
        for shape in shapes:
            bare = min(ms for key, ms in medians.items() if key[0] == shape and BARE in key[1])
            rows[-1] += [quartiles[shape, row], format_number(medians[shape, row] / bare)]
    columns = [column for s in shapes for column in (f"{s}, ms (quartiles)", "× bare")]
    return format_table(["one client", *columns], rows)


def _build_clients(results: list[ClientsResult]) -> str:
    counts = sorted({result.clients for result in results})
    header = ["", ""]
    for count in counts:
        header += [f"{count} client{'s' * (count > 1)}, requests/s", "p50 / p99, ms"]
    rows, exceptions = [], []
    for shape, wire_format in dict.fromkeys((r.shape, r.wire_format) for r in results):
        by_count = {
            r.clients: r for r in results if (r.shape, r.wire_format) == (shape, wire_format)
        }
        rows.append([shape, wire_format])
        for count in counts:
            load = by_count[count].load if count in by_count else None
            rows[-1] += (
                [format_number(load.rate), _format_percentiles(load.timings)] if load else ["", ""]
            )
        rows[-1].append(_format_mebibytes(list(by_count.values())[-1].resident_bytes))
        p50, p99 = _compute_p50_p99(by_count[1].load.timings)
        if p99 > 2 * p50 + 1:
            exceptions.append(f"{shape} in {wire_format}")
    subject = f"All rows but {'; '.join(exceptions)}" if exceptions else "All rows"
    table = format_table([*header, "resident after, MiB"], rows, labels=2)
    target = "Target for one client: p99 is at most twice p50 plus 1 ms."
    return f"{table}\n\n{target} {subject} meet it."


def _build_workloads(results: list[WorkloadResult]) -> str:
    counts = sorted({result.clients for result in results})
    same = {r.clients: r.load.rate for r in results if r.workload == results[0].workload}
    header = [""]
    for count in counts:
        header += [f"{count} client{'s' * (count > 1)}, requests/s", "of the same bytes"]
        header.append("p50 / p99, ms")
    rows = []
    for name in dict.fromkeys(result.workload for result in results):
        rows.append([name])
        for result in (r for r in results if r.workload == name):
            rate = result.load.rate
            rows[-1] += [format_number(rate), f"{rate / same[result.clients]:.2f}"]
            rows[-1].append(_format_percentiles(result.load.timings))
    return format_table(header, rows)


def _build_beside_large(results: list[SmallBesideLargeResult]) -> str:
    header = ["clients at S", "S alone, requests/s", "S beside L", "ratio", "p50 / p99, ms"]
    header += ["L alone, requests/s", "L beside S", "ratio"]
    rows = [
        [
            str(result.clients),
            format_number(result.small_alone.rate),
            format_number(result.small.rate),
            f"{result.small.rate / result.small_alone.rate:.2f}",
            _format_percentiles(result.small.timings),
            format_number(result.large_alone.rate),
            format_number(result.large.rate),
            f"{result.large.rate / result.large_alone.rate:.2f}",
        ]
        for result in results
    ]
    return format_table(header, rows)


def _build_weights(results: list[WeightsResult | ExplicitResult]) -> str:
    explicit = [result for result in results if isinstance(result, ExplicitResult)]
    best = max(result.rate for result in explicit)
    single = next(result.rate for result in explicit if result.processes == result.threads == 1)
    header = ["", "clients", "requests/s", "of explicit", "ms: median", "attention"]
    header += ["queue and transfer", "rest in the service", "outside the service"]
    rows, ratios = [], []
    for result in results:
        if isinstance(result, ExplicitResult):
            threads = f"{result.threads} thread{'s' * (result.threads > 1)}"
            label = f"explicit, {result.processes} × {threads}"
            ratio = f"{result.rate / best:.2f}"
            rows.append([label, "", format_number(result.rate), ratio, *[""] * 5])
            continue
        timings, rate = result.load.timings, result.load.rate
        ratios.append(rate / best)
        stages_ms = [
            [t.latency_ms for t in timings],
            [t.compute_ms for t in timings],
            [t.queue_ms + t.transfer_ms for t in timings],
            [t.total_ms - t.compute_ms - t.queue_ms - t.transfer_ms for t in timings],
            [t.latency_ms - t.total_ms for t in timings],
        ]
        medians = [format_number(statistics.median(ms)) for ms in stages_ms]
        label, clients = result.wire_format, str(result.clients)
        rows.append([label, clients, format_number(rate), f"{ratios[-1]:.2f}", *medians])
    summary = (
        f"The best row reaches {max(ratios):.2f} of explicit attention's rate on all CPUs, and "
        f"{max(ratios) * best / single:.2f} of the rate of one process with one thread. The target "
        f"is {TARGET_RATIO}."
    )
    return f"{format_table(header, rows)}\n\n{summary}"


def _build_connections(results: list[ConnectionsResult]) -> str:
    header = ["connections", "in turn, ms added (quartiles)", "p99", "all at once, requests/s"]
    header += ["p50 / p99, ms", *_MEMORY_HEADER]
    rows = []
    for result in results:
        added_ms = [timing.added_ms for timing in result.sequential.timings]
        rows.append([
            str(result.connections),
            format_quartiles(added_ms),
            format_number(compute_percentile(added_ms, 99)),
            format_number(result.concurrent.rate),
            _format_percentiles(result.concurrent.timings),
            *_format_memory(result.memory),
        ])  # fmt: skip
    return format_table(header, rows)


def _build_body_sizes(results: list[BodySizeResult]) -> str:
    header = ["body", "requests", "ms: median", "attention", "added (quartiles)", "added per MiB"]
    header += _MEMORY_HEADER
    rows, previous_sizes = [], set()
    for result in results:
        timings, size = result.load.timings, result.body_bytes
        added_ms = [timing.added_ms for timing in timings]
        per_mib = format_number(statistics.median(added_ms) * 2**20 / size)
        rows.append([
            _format_bytes(size) + (", again" if size in previous_sizes else ""),
            f"{len(timings):,}",
            format_number(statistics.median(timing.latency_ms for timing in timings)),
            format_number(statistics.median(timing.compute_ms for timing in timings)),
            format_quartiles(added_ms),
            per_mib if size >= 2**20 else "",
            *_format_memory(result.memory),
        ])  # fmt: skip
        previous_sizes.add(size)
    return format_table(header, rows)


def format_table(header: list[str], rows: Iterable[list[str]], labels: int = 1) -> str:
    """Returns a table in Markdown; all columns after the first `labels` are right-aligned."""
    separator = ["---"] * labels + ["---:"] * (len(header) - labels)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, separator, *rows))


def format_number(x: float) -> str:
    """Formats a number with three digits."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:#.3g}"


def format_range(values: Sequence[float]) -> str:
    """Formats the median, and the least and the largest value in brackets."""
    least, most = format_number(min(values)), format_number(max(values))
    return f"{format_number(statistics.median(values))} ({least}–{most})"


def format_quartiles(values: list[float]) -> str:
    """Formats the median, and the quartiles in brackets."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{format_number(median)} ({format_number(low)}–{format_number(high)})"


def compute_percentile(values: list[float], per_cent: int) -> float:
    """Returns a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[per_cent - 1]


def _compute_p50_p99(timings: list[ResponseTiming]) -> tuple[float, float]:
    latencies_ms = [timing.latency_ms for timing in timings]
    return compute_percentile(latencies_ms, 50), compute_percentile(latencies_ms, 99)


def _format_percentiles(timings: list[ResponseTiming]) -> str:
    return " / ".join(map(format_number, _compute_p50_p99(timings)))


def _format_memory(memory: ResidentMemory) -> list[str]:
    return [_format_mebibytes(size) for size in (memory.before, memory.peak, memory.after)]


def _format_mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _format_bytes(size: int) -> str:
    for unit, unit_bytes in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit_bytes:
            return f"{size // unit_bytes} {unit}"
    return f"{size} bytes"
