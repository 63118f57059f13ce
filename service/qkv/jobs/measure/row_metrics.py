"""Metrics of rows of two attention matrices, and their running statistics."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

__all__ = ["ROW_METRICS", "RowMetrics", "RunningStats", "row_metrics"]

ROW_METRICS: Final = (
    "total_variation", "kl_divergence", "js_divergence", "rank_correlation",
    "entropy", "unevenness", "baseline_entropy", "baseline_unevenness",
)  # fmt: skip
"""The names of the metrics of a row."""


class RunningStats(NamedTuple):
    """Running statistics of a metric over many rows.

    Attributes:
        rows: the number of rows that have the metric.
        total: the sum over these rows.
        least, most: the smallest and largest value; infinite if there are no rows.
    """

    rows: float = 0.0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def from_values(cls, values_N: Tensor) -> Self:
        """Returns the statistics of the values of a metric, one per row."""
        if not len(values_N):
            return cls()
        least, most = values_N.aminmax()
        return cls(len(values_N), values_N.sum().item(), least.item(), most.item())

    def merge(self, other: RunningStats) -> RunningStats:
        """Returns the statistics over the rows of both."""
        return RunningStats(
            self.rows + other.rows,
            self.total + other.total,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    @property
    def mean(self) -> float:
        """The mean; NaN if there are no rows."""
        return self.total / self.rows if self.rows else math.nan


class RowMetrics(NamedTuple):
    """The metrics of N rows, each with values only for the rows that have the metric.

    Attributes:
        values: by the names in `ROW_METRICS`, in the order of the rows.
        seen_N: True for a row that is not zero in both matrices.
        masks: for a metric that not all seen rows have, True for the seen rows that have it.
    """

    values: dict[str, Tensor]
    seen_N: Tensor
    masks: dict[str, Tensor]

    def places(self) -> dict[str, Tensor]:
        """Returns the indices of the rows that have a metric, in the order of its values."""
        (seen,) = self.seen_N.nonzero(as_tuple=True)
        return {
            name: seen[self.masks[name]] if name in self.masks else seen
            for name, values in self.values.items()
            if len(values)
        }


def row_metrics(
    variant_NS: Tensor, baseline_NS: Tensor, are_distributions: tuple[bool, bool]
) -> RowMetrics:
    """Computes every metric of N rows. A metric has values only for the rows that have the metric.

    A row that is zero in both matrices has no metric. A key is visible if either matrix gives it
    weight. Logarithms are natural.

    Args:
        variant_NS, baseline_NS: the rows, float64.
        are_distributions: True per matrix if no weight is negative and each row's sum is 1.

    Returns:
        The metrics. Total variation is half the sum of |a - b|. The KL divergence of the variant
        from the baseline is the sum of a log(a / b), infinite where b is 0 and a is not. The
        Jensen-Shannon divergence is the mean of the KL divergences of a and b from (a + b) / 2.
        Spearman's rank correlation is for rows in which neither matrix gives all visible keys the
        same weight. Unevenness is the logarithm of the number of keys with weight, less the
        entropy, for rows with at least two such keys.
    """
    b, a = variant_NS, baseline_NS
    seen_NS = (b != 0) | (a != 0)
    rows = seen_NS.any(-1)
    if not bool(rows.all()):
        b, a, seen_NS = b[rows], a[rows], seen_NS[rows]
    metrics, masks = dict.fromkeys(ROW_METRICS, b.new_empty(0)), {}
    metrics["total_variation"] = (a - b).abs_().sum(-1) / 2
    metrics["rank_correlation"], masks["rank_correlation"] = _rank_correlation(b, a, seen_NS)
    entropies = []
    for rows_NS, prefix, is_distribution in zip(
        (b, a), ("", "baseline_"), are_distributions, strict=True
    ):
        if is_distribution:
            entropy, count = _entropy(rows_NS), (rows_NS != 0).sum(-1)
            any_N, several_N = count > 0, count > 1
            metrics[f"{prefix}entropy"] = entropy[any_N]
            metrics[f"{prefix}unevenness"] = (count.to(entropy).log() - entropy)[several_N]
            masks |= {f"{prefix}entropy": any_N, f"{prefix}unevenness": several_N}
            entropies.append(entropy)
    if all(are_distributions):
        cross_entropy = -torch.xlogy(a, b).sum(-1)
        metrics["kl_divergence"] = (cross_entropy - entropies[1]).clamp_(min=0.0)
        gap = _entropy((a + b) / 2) - (entropies[0] + entropies[1]) / 2
        metrics["js_divergence"] = gap.clamp_(min=0.0)
    return RowMetrics(metrics, rows, masks)


def _entropy(rows_NS: Tensor) -> Tensor:
    return (0.0 - torch.xlogy(rows_NS, rows_NS).sum(-1)).clamp_(min=0.0)


def _rank_correlation(b_NS: Tensor, a_NS: Tensor, seen_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Pearson's correlation of the ranks of some rows, and a mask of these rows.

    A row in which all ranks are equal has no correlation.
    """
    middle_N1 = (seen_NS.sum(-1, keepdim=True, dtype=a_NS.dtype) - 1) / 2
    if bool(seen_NS.all()):
        rank_b, rank_a = (_ranks(x) - middle_N1 for x in (b_NS, a_NS))
    else:
        hidden_NS = ~seen_NS
        rank_b, rank_a = (
            (_ranks(x.masked_fill(hidden_NS, torch.inf)) - middle_N1).masked_fill_(hidden_NS, 0.0)
            for x in (b_NS, a_NS)
        )
    varies = rank_b.square().sum(-1) * rank_a.square().sum(-1)
    has_order = varies > 0
    covaries = (rank_b * rank_a).sum(-1)
    return (covaries[has_order] / varies[has_order].sqrt()).clamp(-1.0, 1.0), has_order


def _ranks(x_NS: Tensor) -> Tensor:
    """Returns ranks from 0 on. Equal values share the mean of their ranks."""
    value, order = x_NS.sort(-1)
    S = x_NS.shape[-1]
    rank = torch.arange(S, dtype=x_NS.dtype, device=x_NS.device).expand_as(x_NS)
    ties = value[:, 1:] == value[:, :-1]
    if bool((ties & value[:, 1:].isfinite()).any()):
        edge = ties.new_zeros(len(ties), 1)
        first = rank.masked_fill(torch.cat([edge, ties], -1), 0.0).cummax(-1).values
        last = rank.masked_fill(torch.cat([ties, edge], -1), S)
        rank = (first + last.flip(-1).cummin(-1).values.flip(-1)) / 2
    return torch.empty_like(x_NS).scatter_(-1, order, rank)
