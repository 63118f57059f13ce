"""Draws bench/results/speed.svg: time against length, from the times of bench/speed.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from speed_tables import BASELINE, Rows

# Okabe and Ito's palette for colour-blind readers; with a darker orange, without the light yellow
_COLOURS: Final = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B87A00", "#000000", "#7A5195",
    "#8A8D00",
)  # fmt: skip
_STYLE: Final[Any] = {"svg.hashsalt": "qkv", "font.size": 11}
_BASELINE: Final[dict[str, Any]] = {"color": "#bbbbbb", "lw": 7, "solid_capstyle": "round"}


def write_figure(rows: Rows, path: Path) -> None:
    """Writes a panel without and one with causality, on logarithmic axes."""
    colours = dict(zip(sorted({row["variant"] for row in rows}), cycle(_COLOURS), strict=False))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12.5, 6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, causal in zip(panels, (False, True), strict=True):
            _draw_panel(axes, [row for row in rows if row["causal"] == causal], colours)
            axes.set_title("causal" if causal else "not causal", loc="left")
        panels[0].set_ylabel("milliseconds a call")
        legends = [axes.get_legend_handles_labels() for axes in reversed(panels)]
        lines = {label: line for legend in legends for line, label in zip(*legend, strict=True)}
        figure.legend(lines.values(), lines, loc="outside right center", frameon=False)
        figure.suptitle("Time of one call by length: 8 heads of width 64, float32, output only")
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(axes: Axes, rows: Rows, colours: Mapping[str, str]) -> None:
    """Draws the medians of each variant, the slowest first, over those of torch's attention."""
    lengths = sorted({row["N"] for row in rows})
    own = {row["variant"]: _medians(rows, row["variant"], "qkv") for row in rows}
    axes.plot(*zip(*_medians(rows, *BASELINE), strict=True), label="torch SDPA", **_BASELINE)
    for name, points in sorted(own.items(), key=lambda item: -item[1][-1][1] / item[1][-1][0]):
        line = zip(*points, strict=True)
        axes.plot(*line, color=colours[name], lw=2, marker="o", ms=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="N, tokens")
    axes.set_xticks(lengths, [f"{N:,}" if N < 1024 else f"{N // 1024}k" for N in lengths])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _medians(rows: Rows, variant: str, contender: str) -> list[tuple[int, float]]:
    """Returns the median milliseconds by length."""
    return sorted(
        (row["N"], statistics.median(row["ms"]))
        for row in rows
        if (row["variant"], row["contender"]) == (variant, contender)
    )
