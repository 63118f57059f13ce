"""Draws the figures of docs/which-heads.md from the results of bench/which_heads.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from line_panels import Line, Panel, draw_panels
from which_heads_results import CONTROL, ORDERS, Results

__all__ = ["MAP_LIMITS", "draw_figures"]

MAP_LIMITS: Final = (0.0, 3.0)
"""The ends of the colour scale of the map; a few heads have larger errors."""


def draw_figures(results: Results, stem: Path) -> None:
    """Writes the figures beside the page: its path without suffix, and a name."""
    figure = results.comparison.figure(
        variants=results.variants, limits=MAP_LIMITS,
        title="Relative error of the output of each head, compared with softmax",
    )  # fmt: skip
    figure.savefig(stem.with_name(f"{stem.name}-map.svg"), metadata={"Date": None})
    for name, text in (("k", _draw_ks(results)), ("order", _draw_orders(results))):
        stem.with_name(f"{stem.name}-{name}.svg").write_text(text, encoding="utf-8", newline="\n")


def _draw_ks(results: Results) -> str:
    """Returns the figure with a line for each variant."""
    measures = {
        "mean_cosine": "mean cosine similarity to the model's own embeddings",
        "rank_correlation": "rank correlation of the similarities of all pairs",
    }
    panels = []
    for field, title in measures.items():
        lines = []
        for n, name in enumerate(results.rows):
            by_k = results.by_k(name, "closest")
            points = [(0, 1.0), *((k, float(getattr(by_k[k], field))) for k in sorted(by_k))]
            lines.append(Line(name, points, n, "5 4" if name == CONTROL else ""))
        panels.append(_panel(title, lines))
    title = "Sentence embeddings with the closest heads substituted"
    return draw_panels(title, panels, "heads substituted", _ticks(results), has_legend=False)


def _draw_orders(results: Results) -> str:
    """Returns the figure with a panel for each variant and a line for each order."""
    styles: dict[str, tuple[int, str]] = {
        "effect": (2, ""), "closest": (0, ""), "random": (4, "5 4"), "farthest": (1, ""),
    }  # fmt: skip
    panels = []
    for name in results.variants:
        by_k = results.by_k(name, "closest")
        last = max(by_k)
        lines = []
        for order, (colour, dash) in styles.items():
            points = [(0, 1.0), *results.order_line(name, order)]
            points.append((last, by_k[last].mean_cosine))
            lines.append(Line(ORDERS[order], points, colour, dash))
        panels.append(_panel(name, lines))
    low = min(panel.low for panel in panels)
    panels = [panel._replace(low=low) for panel in panels]
    title = "Mean cosine similarity to the model's own embeddings, for four orders of heads"
    return draw_panels(title, panels, "heads substituted", _ticks(results), has_legend=True)


def _ticks(results: Results) -> range:
    """Returns six steps from no head to all."""
    count = len(results.rows[CONTROL])
    return range(0, count + 1, count // 6)


def _panel(title: str, lines: Sequence[Line]) -> Panel:
    least = min(y for line in lines for _, y in line.points)
    return Panel(title, lines, math.floor(least * 5) / 5)
