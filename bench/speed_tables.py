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
    """Returns a table of milliseconds, not causal and causal."""
    tables = []
    for causal in (False, True):
        times: Times = {
            (r["variant"], r["contender"], r["N"]): r["ms"] for r in rows if r["causal"] == causal
        }
        tables.append(_build_times("causal" if causal else "not causal", times))
    return tables


def _build_times(title: str, times: Times) -> Table:
    lengths = sorted({N for *_, N in times})[::2]
    rows: list[list[Cell]] = []
    for name in sorted({name for name, *_ in times}):
        for contender, label in _LABELS.items():
            own = [times.get((name, contender, N)) for N in lengths]
            if any(own):
                label = "torch SDPA" if (name, contender) == BASELINE else label
                rows.append([label or f"`{name}`", *(ms and quartiles(ms) for ms in own)])
    return Table(title, ["N", *(f"{N:,}" for N in lengths)], rows)
