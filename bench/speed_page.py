"""Writes docs/speed.md and docs/speed.svg from the figures of bench/speed.py."""

from __future__ import annotations

import math
import statistics
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGE: Final = Path(__file__).parent.parent / "docs/speed.md"
MARK: Final = "<!-- what follows is written by make speed -->\n"
REFERENCE: Final = ("softmax", "plain")  # torch's own attention, the baseline

_LABELS: Final = {"ours": "", "plain": "plain torch", "library": "what libraries write"}

# Okabe and Ito's palette for colour-blind readers; with a darker orange, without the light yellow
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B87A00", "#000000")
_INK, _FAINT, _CARD = "#333333", "#dddbd5", "#fcfbf8"

Rows = list[dict[str, Any]]


def write(about: str, rows: Rows) -> None:
    """Writes both files; the hand-written text above the mark stays."""
    prose = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{prose}{MARK}\n{about}\n\n{tables(rows)}")
    draw(rows).savefig(PAGE.with_suffix(".svg"), metadata={"Date": None})


def tables(rows: Rows) -> str:
    """Returns tables of milliseconds, and of ratios to plain torch and to torch's own attention."""
    lines = []
    for causal in sorted({row["causal"] for row in rows}):
        own = {(r["variant"], r["who"], r["N"]): r["ms"] for r in rows if r["causal"] == causal}
        lengths = sorted({N for *_, N in own})
        names = sorted({name for name, *_ in own})
        lines += [f"### {'Causal' if causal else 'Not causal'}", ""]
        lines += ["Milliseconds: median (quartiles).", ""]
        lines += _head("", lengths)
        for name in names:
            for who, label in _LABELS.items():
                if name == REFERENCE[0] and who == REFERENCE[1]:
                    label = "torch SDPA"
                label = f"`{name}`" if who == "ours" else label
                cells = [_times(own.get((name, who, N))) for N in lengths]
                lines.append(_row(label, cells)) if any(cells) else None
        for other, label in list(_LABELS.items())[1:]:
            if not any(who == other for _, who, _ in own):
                continue
            lines += ["", f"Ours over {label}, of each round: median (quartiles).", ""]
            lines += _head("", lengths)
            for name in names:
                cells = [
                    _ratio(own.get((name, "ours", N)), own.get((name, other, N))) for N in lengths
                ]
                if any(cells) or other == "plain":
                    lines.append(_row(f"`{name}`", cells))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _head(first: str, lengths: list[int]) -> list[str]:
    return [_row(f"{first} N", [f"{N:,}" for N in lengths]), "| --- |" + " ---: |" * len(lengths)]


def _row(label: str, cells: list[str]) -> str:
    return "| " + " | ".join([label.strip(), *cells]) + " |"


def _times(values: list[float] | None) -> str:
    if values is None:
        return ""
    low, median, high = (_digits(x) for x in statistics.quantiles(values, n=4))
    return f"{median} ({low}–{high})"


def _digits(x: float) -> str:
    """Formats a number with three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def _ratio(ours: list[float] | None, plain: list[float] | None) -> str:
    if ours is None or plain is None:
        return ""
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def draw(rows: Rows) -> Figure:
    """Draws time against length on logarithmic axes, with labels beside the lines."""
    mpl.rcParams.update({"svg.hashsalt": "qkv", "font.size": 11, "font.family": "DejaVu Sans"})
    figure = Figure(figsize=(12.5, 6.2), facecolor=_CARD, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = sorted({row["variant"] for row in rows})
    colours = dict(zip(names, cycle(_COLOURS), strict=False))
    for axes, causal in zip(panels, (False, True), strict=True):
        _panel(axes, [r for r in rows if r["causal"] == causal], colours)
        axes.set_title("causal" if causal else "not causal", loc="left", color=_INK)
    panels[0].set_ylabel("milliseconds a call", color=_INK)
    figure.suptitle(
        "Time of one call by length: 8 heads of width 64, float32, output only",
        x=0.012, ha="left", size=14, weight="bold", color=_INK,
    )  # fmt: skip
    return figure


def _panel(axes: Axes, rows: Rows, colours: dict[str, str]) -> None:
    ends = []
    for name, colour in colours.items():
        for who, style in ((REFERENCE[1], "reference"), ("ours", "own")):
            if style == "reference" and name != REFERENCE[0]:
                continue
            own = sorted((r["N"], statistics.median(r["ms"])) for r in rows
                         if (r["variant"], r["who"]) == (name, who))  # fmt: skip
            if not own:
                continue
            at, times = zip(*own, strict=True)
            if style == "reference":
                axes.plot(at, times, color="#9a9a9a", lw=7, alpha=0.45, solid_capstyle="round")
                ends.append((times[-1], at[-1], "torch SDPA", "#777777"))
            else:
                axes.plot(at, times, color=colour, lw=2, marker="o", ms=4)
                ends.append((times[-1], at[-1], name, colour))
    axes.set(xscale="log", yscale="log", facecolor=_CARD)
    lengths = sorted({row["N"] for row in rows})
    first, last = lengths[0], lengths[-1]
    axes.set_xticks(lengths, [f"{N:,}" if N < 1024 else f"{N // 1024}k" for N in lengths])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axes.set_xlabel("N, tokens", color=_INK)
    axes.grid(color=_FAINT, lw=0.8)
    axes.tick_params(which="both", colors=_INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlim(first / 1.2, last * (last / first) ** 0.28)  # room for the labels
    _label(axes, ends)


def _label(axes: Axes, ends: list[tuple[float, int, str, str]]) -> None:
    """Writes a name at each line's end.

    The name is left of a line that ends early: the line is steep, so there is space.
    """
    low, high = axes.get_ylim()
    for x in {x for _, x, *_ in ends}:
        own = sorted(end for end in ends if end[1] == x)
        ys = _spread([math.log(y) for y, *_ in own], math.log(high / low) * 0.048)
        for (y, _, name, colour), at in zip(own, ys, strict=True):
            late = x == max(x for _, x, *_ in ends)
            axes.annotate(
                name, (x, y), xytext=(x * 1.3 if late else x / 1.3, math.exp(at)), color=colour,
                weight="bold", va="center", ha="left" if late else "right",
                arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "alpha": 0.7,
                            "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip


def _spread(heights: list[float], apart: float) -> list[float]:
    """Returns sorted heights, moved until neighbours are at least `apart` from each other."""
    heights = list(heights)
    for _ in range(200):
        for i in range(1, len(heights)):
            push = max(0.0, apart - (heights[i] - heights[i - 1])) / 2
            heights[i - 1] -= push
            heights[i] += push
    return heights
