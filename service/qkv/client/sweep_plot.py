"""Draws a sweep with matplotlib: times against lengths, and the crossovers.

`Sweep.plot`, `AsyncSweep.plot` and `qkv sweep --plot` use `draw_sweep`.
"""

from __future__ import annotations

from itertools import cycle
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkv.client.sweep_cells import SweepResults

__all__ = ["draw_sweep"]

# the palette of Okabe and Ito, for all kinds of colour vision; orange is darker here, and yellow
# is left out because it is too light
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B87A00", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_TEXT, _GRID, _BACKGROUND = "#333333", "#dddbd5", "#fcfbf8"


def draw_sweep(results: SweepResults) -> Figure:
    """Returns the medians and the range of their repeats, on logarithmic axes."""
    figure = Figure(figsize=(8, 5), facecolor=_BACKGROUND, layout="constrained")
    axes: Axes = figure.subplots()
    axes.set(xscale="log", yscale="log", facecolor=_BACKGROUND)
    styles = cycle(zip(_COLOURS, _MARKERS, strict=True))
    for (index, name), (colour, mark) in zip(results.names.items(), styles, strict=False):
        cells = [c for c in results.cells if c.index == index and c.problem is None]
        cells.sort(key=lambda cell: cell.length)
        lengths = [cell.length for cell in cells]
        least, median, most = (
            [float(getattr(cell, f"{which}_ms")) for cell in cells]
            for which in ("least", "median", "most")
        )
        label = name.replace("\n", " ")
        axes.plot(lengths, median, color=colour, marker=mark, markersize=5, label=label)
        axes.fill_between(lengths, least, most, color=colour, alpha=0.15, linewidth=0)
    _draw_crossovers(axes, results)
    _style_axes(axes, sorted({cell.length for cell in results.cells}))
    return figure


def _draw_crossovers(axes: Axes, results: SweepResults) -> None:
    """Draws a vertical line at each crossover, with its variants and lengths."""
    names = {index: name.replace("\n", " ") for index, name in results.names.items()}
    for crossover in results.crossovers:
        first, second = crossover.between
        faster = f"{names[crossover.after]} faster than {names[crossover.before]}"
        axes.axvline(crossover.length, color=_TEXT, linestyle=(0, (2, 3)), linewidth=1)
        axes.annotate(
            f" {faster} between {first:,} and {second:,}", (crossover.length, 0.01), rotation=90,
            xycoords=("data", "axes fraction"), ha="right", va="bottom", color=_TEXT, size="small",
        )  # fmt: skip


def _style_axes(axes: Axes, lengths: list[int]) -> None:
    axes.set_xlabel("length of queries and keys", color=_TEXT)
    axes.set_ylabel("milliseconds", color=_TEXT)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(colors=_TEXT, which="both")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_color(_GRID)
    axes.legend(frameon=False, labelcolor=_TEXT)
