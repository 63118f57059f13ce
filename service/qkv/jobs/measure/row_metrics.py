"""Metrics of the rows of two attention matrices."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["ROW_METRICS", "RowMetrics", "row_metrics"]

ROW_METRICS: Final = (
    "total_variation", "kl_divergence", "js_divergence", "rank_correlation",
    "entropy", "unevenness", "baseline_entropy", "baseline_unevenness",
)  # fmt: skip
"""The names of the metrics of a row."""


class RowMetrics(NamedTuple):
    """The M metrics of N rows, in the order of `ROW_METRICS`.

    Attributes:
        values_MN: float64; without meaning for a row that does not have the metric.
        has_MN: True for a row that has the metric.
    """

    values_MN: Tensor
    has_MN: Tensor


def row_metrics(
    variant_NS: Tensor, baseline_NS: Tensor, are_distributions: tuple[bool, bool]
) -> RowMetrics:
    """Computes every metric of N rows.

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
    seen_N = seen_NS.any(-1)
    metrics = {
        "total_variation": ((a - b).abs_().sum(-1) / 2, seen_N),
        "rank_correlation": _rank_correlation(b, a, seen_NS),
    }
    entropies = []
    for rows_NS, prefix, is_distribution in zip(
        (b, a), ("", "baseline_"), are_distributions, strict=True
    ):
        if is_distribution:
            entropy, count = _entropy(rows_NS), (rows_NS != 0).sum(-1)
            metrics[f"{prefix}entropy"] = entropy, count > 0
            metrics[f"{prefix}unevenness"] = count.to(entropy).log() - entropy, count > 1
            entropies.append(entropy)
    if all(are_distributions):
        cross_entropy = -torch.xlogy(a, b).sum(-1)
        metrics["kl_divergence"] = (cross_entropy - entropies[1]).clamp_(min=0.0), seen_N
        gap = _entropy((a + b) / 2) - (entropies[0] + entropies[1]) / 2
        metrics["js_divergence"] = gap.clamp_(min=0.0), seen_N
    none = b.new_zeros(len(b)), torch.zeros_like(seen_N)
    values, has = zip(*(metrics.get(name, none) for name in ROW_METRICS), strict=True)
    return RowMetrics(torch.stack(values), torch.stack(has))


def _entropy(rows_NS: Tensor) -> Tensor:
    return (0.0 - torch.xlogy(rows_NS, rows_NS).sum(-1)).clamp_(min=0.0)


def _rank_correlation(b_NS: Tensor, a_NS: Tensor, seen_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Pearson's correlation of the ranks of each row, and True for a row that has one.

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
    varies_N = rank_b.square().sum(-1) * rank_a.square().sum(-1)
    covaries_N = (rank_b * rank_a).sum(-1)
    return (covaries_N / varies_N.sqrt()).clamp(-1.0, 1.0), varies_N > 0


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
