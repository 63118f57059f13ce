"""Tables of bench/results/capacity.md from the costs that bench/capacity.py measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from capacity_model import FIRST_FORM, UNITS, Cost, Prediction, rate_of
from tables import Cell, Table, format_cell, spread

_RATE: Final = 1_000_000


def build_tables(costs: Sequence[Cost], predictions: Sequence[Prediction]) -> list[Table]:
    """Returns the tables in the order of the page."""
    first = {cost.shape: cost for cost in costs if cost.form == FIRST_FORM}
    return [
        _of_costs(
            "one request",
            ["KiB in", "KiB out", "Mflop", "HTTP process, µs", "compute, µs"],
            costs,
            lambda cost: [
                cost.bytes_in / 1024, cost.bytes_out / 1024, cost.flops / 1e6,
                spread([each * 1e6 for each in cost.http_cpu_s]),
                spread([each * 1e6 for each in cost.compute_cpu_s]),
            ],
        ),
        _of_costs(
            "a million",
            [f"{unit.name} ({unit.source})" for unit in UNITS],
            costs,
            lambda cost: [unit.count_for(cost, _RATE) for unit in UNITS],
        ),
        _of_costs("a host", ["requests/s", "saturated first"], costs, _saturation),
        _of_costs(
            "forms",
            ["bytes", "HTTP process", "compute on a CPU", "GPU"],
            costs,
            lambda cost: _ratios(cost, first[cost.shape]),
            _describe_bytes(first),
        ),
        Table(
            "predictions",
            ["", "workers", "predicted, requests/s", "measured", "measured / predicted"],
            [
                [each.shape, each.workers, each.predicted, spread(each.measured),
                 spread([rate / each.predicted for rate in each.measured])]
                for each in predictions
            ],
        ),
    ]  # fmt: skip


def _of_costs(
    title: str,
    columns: Sequence[str],
    costs: Sequence[Cost],
    cells: Callable[[Cost], list[Cell]],
    note: str = "",
) -> Table:
    """Returns a table with a row for each kind of request."""
    rows = [[cost.shape, cost.form, *cells(cost)] for cost in costs]
    return Table(title, ["", "request", *columns], rows, labels=2, note=note)


def _saturation(cost: Cost) -> list[Cell]:
    """Returns the rate of a host, and what limits it."""
    rate, parts = rate_of(cost)
    shares = dict(zip([unit.name for unit in UNITS], parts, strict=False))
    (first,) = (name for name, part in shares.items() if part == 1)
    others = ", ".join(f"{name} {part:.0%}" for name, part in shares.items() if part < 1)
    return [rate, f"{first} ({others})"]


def _ratios(cost: Cost, base: Cost) -> list[Cell]:
    """Returns the costs relative to those of q, k and v in float32."""
    *_, gpu, _ = UNITS
    return [
        (cost.bytes_in + cost.bytes_out) / (base.bytes_in + base.bytes_out),
        statistics.median(cost.http_cpu_s) / statistics.median(base.http_cpu_s),
        statistics.median(cost.compute_cpu_s) / statistics.median(base.compute_cpu_s),
        gpu.seconds(cost) / gpu.seconds(base),
    ]


def _describe_bytes(first: Mapping[str, Cost]) -> str:
    """Tells what the bytes of each request cost an HTTP process above the smallest request."""
    smallest, *others = sorted(first.values(), key=lambda cost: cost.bytes_in)
    least = statistics.median(smallest.http_cpu_s)
    per_mib = []
    for cost in others:
        more = cost.bytes_in + cost.bytes_out - smallest.bytes_in - smallest.bytes_out
        us = (statistics.median(cost.http_cpu_s) - least) / (more / 2**20) * 1e6
        per_mib.append(f"{cost.shape} {format_cell(us)} µs")
    text = f"An HTTP process uses {format_cell(least * 1e6)} µs for a request {smallest.shape}."
    return f"{text} Each further MiB in or out takes: {', '.join(per_mib)}." if per_mib else text
