"""Tables of docs/clusters.md from the results of bench/capacity.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from capacity_model import FIRST_FORM, UNITS, Cost, Prediction, rate_of
from run_page import format_number, format_range, format_table

__all__ = ["build_tables"]

_RATE: Final = 1_000_000
_LABELS: Final = 2


def build_tables(
    about: str, costs: Sequence[Cost], predictions: Sequence[Prediction]
) -> dict[str, str]:
    """Returns the texts by the names of their marks."""
    texts = {
        "about": about,
        "one request": _build_costs(costs),
        "a million": _build_units(costs),
        "a host": _build_host(costs),
        "forms": _build_forms(costs),
        "predictions": _build_predictions(predictions),
    }
    return {f"made by `make capacity`: {name}": text for name, text in texts.items()}


def _build_costs(costs: Sequence[Cost]) -> str:
    header = ["", "request", "KiB in", "KiB out", "Mflop", "HTTP process, µs", "compute, µs"]
    rows = [
        [
            cost.shape,
            cost.form,
            format_number(cost.bytes_in / 1024),
            format_number(cost.bytes_out / 1024),
            format_number(cost.flops / 1e6),
            _format_us(cost.http_cpu_s),
            _format_us(cost.compute_cpu_s),
        ]
        for cost in costs
    ]
    return format_table(header, rows, labels=_LABELS)


def _build_units(costs: Sequence[Cost]) -> str:
    header = ["", "request", *(f"{unit.name} ({unit.source})" for unit in UNITS)]
    rows = [
        [cost.shape, cost.form, *(f"{unit.count_for(cost, _RATE):,}" for unit in UNITS)]
        for cost in costs
    ]
    return format_table(header, rows, labels=_LABELS)


def _build_host(costs: Sequence[Cost]) -> str:
    header = ["", "request", "requests/s", "saturated first"]
    rows = []
    for cost in costs:
        rate, parts = rate_of(cost)
        used = [
            f"{unit.name} {part:.0%}" for unit, part in zip(UNITS, parts, strict=False) if part < 1
        ]
        (first,) = (unit.name for unit, part in zip(UNITS, parts, strict=False) if part == 1)
        rows.append([cost.shape, cost.form, format_number(rate), f"{first} ({', '.join(used)})"])
    return format_table(header, rows, labels=_LABELS)


def _build_forms(costs: Sequence[Cost]) -> str:
    header = ["", "request", "bytes", "HTTP process", "compute on a CPU", "GPU"]
    first = {cost.shape: cost for cost in costs if cost.form == FIRST_FORM}
    *_, gpu, _ = UNITS
    rows = []
    for cost in costs:
        base = first[cost.shape]
        ratios = (
            (cost.bytes_in + cost.bytes_out) / (base.bytes_in + base.bytes_out),
            statistics.median(cost.http_cpu_s) / statistics.median(base.http_cpu_s),
            statistics.median(cost.compute_cpu_s) / statistics.median(base.compute_cpu_s),
            gpu.seconds(cost) / gpu.seconds(base),
        )
        rows.append([cost.shape, cost.form, *map(format_number, ratios)])
    return f"{format_table(header, rows, labels=_LABELS)}\n\n{_describe_bytes(first)}"


def _describe_bytes(first: Mapping[str, Cost]) -> str:
    """Tells what the bytes of each request cost an HTTP process above the smallest request."""
    smallest, *others = sorted(first.values(), key=lambda cost: cost.bytes_in)
    least = statistics.median(smallest.http_cpu_s)
    per_mib = []
    for cost in others:
        more = cost.bytes_in + cost.bytes_out - smallest.bytes_in - smallest.bytes_out
        us = (statistics.median(cost.http_cpu_s) - least) / (more / 2**20) * 1e6
        per_mib.append(f"{cost.shape} {format_number(us)} µs")
    text = f"An HTTP process uses {format_number(least * 1e6)} µs for a request {smallest.shape}."
    return f"{text} Each further MiB in or out takes: {', '.join(per_mib)}." if per_mib else text


def _build_predictions(predictions: Sequence[Prediction]) -> str:
    header = ["", "workers", "predicted, requests/s", "measured", "measured / predicted"]
    rows = [
        [
            each.shape,
            str(each.workers),
            format_number(each.predicted),
            format_range(each.measured),
            format_range([rate / each.predicted for rate in each.measured]),
        ]
        for each in predictions
    ]
    return format_table(header, rows)


def _format_us(seconds: Sequence[float]) -> str:
    return format_range([each * 1e6 for each in seconds])
