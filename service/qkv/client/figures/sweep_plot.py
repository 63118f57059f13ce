"""Draws a sweep: times against lengths, and the crossovers.

`Sweep.plot`, `AsyncSweep.plot` and `qkv sweep --plot` use `draw_sweep`.
"""

from __future__ import annotations

from itertools import cycle
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkv.client.figures.heat_maps import figure_of
from qkv.client.sweep_cells import SweepResults

# the palette of Okabe and Ito, for all kinds of colour vision; orange is darker here, and yellow
# is left out because it is too light
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B87A00", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def draw_sweep(results: SweepResults, ax: Axes | None = None) -> Figure:
    """Returns the medians and the range of their repeats, on logarithmic axes.

    Args:
        results: measured cells.
        ax: draws there; None: a new figure.
    """
    if ax is None:
        ax = Figure(figsize=(8, 5), layout="constrained").subplots()
    decodes = any(cell.way is not None for cell in results.cells)
    x = "tokens before the next one" if decodes else "length of queries and keys"
    ax.set(xscale="log", yscale="log", xlabel=x, ylabel="milliseconds")
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
        ax.plot(lengths, median, color=colour, marker=mark, markersize=5, label=label)
        ax.fill_between(lengths, least, most, color=colour, alpha=0.15, linewidth=0)
    _draw_crossovers(ax, results)
    lengths = sorted({cell.length for cell in results.cells})
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(alpha=0.4)
    ax.legend(frameon=False)
    return figure_of(ax)


def _draw_crossovers(ax: Axes, results: SweepResults) -> None:
    """Draws a vertical line at each crossover, with its variants and lengths."""
    names = {index: name.replace("\n", " ") for index, name in results.names.items()}
    for crossover in results.crossovers:
        first, second = crossover.between
        faster = f"{names[crossover.after]} faster than {names[crossover.before]}"
        ax.axvline(crossover.length, color="0.3", linestyle=":", linewidth=1)
        ax.annotate(
            f" {faster} between {first:,} and {second:,}", (crossover.length, 0.01), rotation=90,
            xycoords=("data", "axes fraction"), ha="right", va="bottom", size="small",
        )  # fmt: skip
