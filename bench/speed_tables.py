"""Tables of bench/results/speed.md from the times of bench/speed.py.

They show every second length, as many as a page is wide; the picture shows all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tables import Cell, Table, quartiles

BASELINE: Final = ("softmax", "plain torch")  # torch's own attention, the baseline

_LABELS: Final = {"qkv": "", "plain torch": "plain torch", "library": "library formula"}

Rows = Sequence[Mapping[str, Any]]
Times = Mapping[tuple[str, str, int], Sequence[float]]


def build_tables(rows: Rows) -> list[Table]:
    """Returns tables of milliseconds, and of ratios to plain torch and to the library formulas."""
    tables = []
    for causal in (False, True):
        times: Times = {
            (r["variant"], r["contender"], r["N"]): r["ms"] for r in rows if r["causal"] == causal
        }
        title = "causal" if causal else "not causal"
        tables.append(_build_times(f"{title}, ms", times))
        for other, label in list(_LABELS.items())[1:]:
            if any(contender == other for _, contender, _ in times):
                tables.append(_build_ratios(f"{title}, qkv / {label}", times, other))
    return tables


def _build_times(title: str, times: Times) -> Table:
    lengths = _lengths(times)
    rows: list[list[Cell]] = []
    for name in sorted({name for name, *_ in times}):
        for contender, label in _LABELS.items():
            own = [times.get((name, contender, N)) for N in lengths]
            if any(own):
                label = "torch SDPA" if (name, contender) == BASELINE else label
                rows.append([label or f"`{name}`", *(ms and quartiles(ms) for ms in own)])
    return Table(title, ["N", *(f"{N:,}" for N in lengths)], rows)


def _build_ratios(title: str, times: Times, other: str) -> Table:
    """Returns the ratios of each round."""
    lengths = _lengths(times)
    rows: list[list[Cell]] = []
    for name in sorted({name for name, contender, _ in times if contender == other}):
        pairs = [(times.get((name, "qkv", N)), times.get((name, other, N))) for N in lengths]
        rows.append([f"`{name}`", *(_ratio(*pair) for pair in pairs)])
    return Table(title, ["N", *(f"{N:,}" for N in lengths)], rows)


def _lengths(times: Times) -> list[int]:
    return sorted({N for *_, N in times})[::2]


def _ratio(ms: Sequence[float] | None, other_ms: Sequence[float] | None) -> Cell:
    if ms is None or other_ms is None:
        return None
    return quartiles([a / b for a, b in zip(ms, other_ms, strict=True)])
