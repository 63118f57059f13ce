"""A row of a comparison, and the sums over the rows of attention that it is computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FIGURES: Final = (
    "relative_error", "largest_error", "cosine", "total_variation", "kl_divergence",
    "js_divergence", "rank_correlation", "entropy", "baseline_entropy",
)  # fmt: skip
"""The names of the figures of a head."""
_SKIPPED: Final = {"rank_correlation", "entropy", "baseline_entropy"}
"""Figures of the sequences that have them; the others are None if one sequence has none."""


@dataclass(frozen=True, slots=True)
class HeadRow:
    """One variant in one head of one layer, compared with the baseline.

    Figures are those of `POST /v1/compare`, of each sequence without its padding. They are averaged
    over sequences and calls, weighted by their number of queries. `largest_error` is the largest.
    A figure that is undefined or infinite is None.

    Attributes:
        layer: qualified name of the module.
        head: number of the query head in the model.
        variant: its name, with the parameters that distinguish it from others of that name.
        relative_error: Frobenius norm of the output's error, divided by that of the baseline.
        largest_error: the largest absolute error of the output.
        cosine: of the angle between both outputs.
        total_variation: half the sum of |a - b| of rows of weights.
        kl_divergence: from the variant's rows of weights to the baseline's, nats.
        js_divergence: Jensen-Shannon divergence of both rows, nats.
        rank_correlation: Spearman's, of both rows.
        entropy: of the variant's rows, nats.
        baseline_entropy: of the baseline's rows, nats.
        queries: the number of queries in all sequences and calls, without padding.
        problem: the reason why the head could not be compared; then all figures are None.
    """

    layer: str
    head: int
    variant: str
    relative_error: float | None = None
    largest_error: float | None = None
    cosine: float | None = None
    total_variation: float | None = None
    kl_divergence: float | None = None
    js_divergence: float | None = None
    rank_correlation: float | None = None
    entropy: float | None = None
    baseline_entropy: float | None = None
    queries: int = 0
    problem: str | None = None


@dataclass(slots=True)
class HeadSums:
    """The sums of the figures of a head over sequences.

    Attributes:
        queries: the number of queries.
        problem: the first problem; None: none.
    """

    queries: int = 0
    problem: str | None = None
    _totals: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict)

    def add(self, queries: int, figures: Mapping[str, float | None]) -> None:
        """Adds the figures of a sequence with so many queries."""
        self.queries += queries
        for name in FIGURES:
            value = figures[name]
            if value is None and name in _SKIPPED:
                continue
            self._put(name, math.nan if value is None else value * _factor(name, queries), queries)

    def merge(self, other: HeadSums) -> None:
        """Adds other sums of the same head."""
        self.queries += other.queries
        self.problem = self.problem or other.problem
        for name, total in other._totals.items():
            self._put(name, total, other._weights[name])

    def row(self, layer: str, head: int, variant: str) -> HeadRow:
        """Returns the means as a row."""
        figures: dict[str, Any] = {}
        if self.problem is None:
            for name, total in self._totals.items():
                mean = total / _factor(name, self._weights[name])
                figures[name] = None if math.isnan(mean) else mean
        return HeadRow(layer, head, variant, **figures, queries=self.queries, problem=self.problem)

    def _put(self, name: str, total: float, weight: int) -> None:
        before = self._totals.get(name, 0.0)
        both = before + total
        if name == "largest_error" and not math.isnan(both):
            both = max(before, total)
        self._totals[name] = both
        self._weights[name] = self._weights.get(name, 0) + weight


def _factor(name: str, queries: int) -> int:
    """Returns the weight of a figure; the largest error is no mean."""
    return 1 if name == "largest_error" else queries


def figures_of(compared: Any, baseline: Any) -> dict[str, float | None]:
    """Returns the figures of one head of a response.

    Args:
        compared, baseline: entries of `heads` of a variant and of the baseline.
    """
    output, weights = compared.output, compared.weights
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    if output is not None:
        for name in ("relative_error", "largest_error", "cosine"):
            figures[name] = getattr(output, name)
    if weights is not None:
        for name in FIGURES[3:8]:
            each = getattr(weights, name)
            figures[name] = None if each is None else each.mean
    if baseline.weights is not None and baseline.weights.entropy is not None:
        figures["baseline_entropy"] = baseline.weights.entropy.mean
    return figures
