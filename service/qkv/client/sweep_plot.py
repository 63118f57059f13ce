"""A sweep as a picture: time against length, and where variants cross. Needs qkv[plot]."""

from __future__ import annotations

from itertools import cycle
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkv.client.sweep_cells import Cells

__all__ = ["draw"]

# Okabe and Ito's, told apart by eyes of all kinds; orange is darker, yellow left out: too light
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B87A00", "#000000")
_MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
_INK, _FAINT, _CARD = "#333333", "#dddbd5", "#fcfbf8"


def draw(measured: Cells) -> Figure:
    """Medians with the range of their repeats, on logarithmic axes."""
    figure = Figure(figsize=(8, 5), facecolor=_CARD, layout="constrained")
    axes: Axes = figure.subplots()
    axes.set(xscale="log", yscale="log", facecolor=_CARD)
    looks = cycle(zip(_COLOURS, _MARKS, strict=True))
    for (index, name), (colour, mark) in zip(measured.names.items(), looks, strict=False):
        ran = [c for c in measured.cells if c.index == index and c.problem is None]
        ran.sort(key=lambda cell: cell.length)
        lengths = [cell.length for cell in ran]
        least, median, most = (
            [float(getattr(cell, f"{which}_ms")) for cell in ran]
            for which in ("least", "median", "most")
        )
        label = name.replace("\n", " ")
        axes.plot(lengths, median, color=colour, marker=mark, markersize=5, label=label)
        axes.fill_between(lengths, least, most, color=colour, alpha=0.15, linewidth=0)
    _mark(axes, measured)
    _dress(axes, sorted({cell.length for cell in measured.cells}))
    return figure


def _mark(axes: Axes, measured: Cells) -> None:
    """A line down at each crossover, and who passes under whom there."""
    names = {index: name.replace("\n", " ") for index, name in measured.names.items()}
    for crossover in measured.crossovers:
        passes = f"{names[crossover.after]} under {names[crossover.before]}"
        axes.axvline(crossover.length, color=_INK, linestyle=(0, (2, 3)), linewidth=1)
        axes.annotate(
            f" {passes} from {crossover.length:,.0f}", (crossover.length, 0.01), rotation=90,
            xycoords=("data", "axes fraction"), ha="right", va="bottom", color=_INK, size="small",
        )  # fmt: skip


def _dress(axes: Axes, lengths: list[int]) -> None:
    axes.set_xlabel("length of queries and keys", color=_INK)
    axes.set_ylabel("milliseconds", color=_INK)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(colors=_INK, which="both")
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(_FAINT)
    axes.legend(frameon=False, labelcolor=_INK)
