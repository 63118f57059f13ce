"""How rows of two attention matrices differ, and what is kept of many such figures."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

__all__ = ["FIGURES", "Spread", "figures"]

FIGURES: Final = (
    "total_variation", "kl_divergence", "js_divergence", "rank_correlation",
    "entropy", "unevenness", "anchor_entropy", "anchor_unevenness",
)  # fmt: skip
"""What is found of each row."""


class Spread(NamedTuple):
    """Figures of many rows, as far as they are kept.

    Attributes:
        rows: those that have the figure.
        total: of all of them.
        least, most: infinite where there is none.
    """

    rows: float = 0.0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, each_N: Tensor) -> Self:
        """Of the figures of some rows."""
        if not len(each_N):
            return cls()
        least, most = each_N.aminmax()
        return cls(len(each_N), each_N.sum().item(), least.item(), most.item())

    def plus(self, more: Spread) -> Spread:
        """Of both."""
        return Spread(
            self.rows + more.rows,
            self.total + more.total,
            min(self.least, more.least),
            max(self.most, more.most),
        )

    @property
    def mean(self) -> float:
        """NaN where there is none."""
        return self.total / self.rows if self.rows else math.nan


def figures(
    variant_NS: Tensor, anchor_NS: Tensor, are_distributions: tuple[bool, bool]
) -> dict[str, Tensor]:
    """Every figure of N rows, each of those rows alone that have it.

    A row in which neither has weights has none. Keys count as seen where either has weight. Logs
    are natural.

    Args:
        variant_NS, anchor_NS: the rows, float64.
        are_distributions: whether the rows of either are none negative with a sum of 1.

    Returns:
        By the names in `FIGURES`: total variation, half the sum of |a - b|; KL divergence of the
        variant from the anchor, sum a log(a / b), infinite where b is 0 and a is not; Jensen-
        Shannon, the mean of both divergences from their middle; Spearman's rank correlation, where
        neither has all seen keys alike; entropies; and by how much an entropy falls short of the
        logarithm of how many keys have weight, for rows with several.
    """
    b, a = variant_NS, anchor_NS
    seen_NS = (b != 0) | (a != 0)
    rows = seen_NS.any(-1)
    if not bool(rows.all()):
        b, a, seen_NS = b[rows], a[rows], seen_NS[rows]
    found = dict.fromkeys(FIGURES, b.new_empty(0))
    found["total_variation"] = (a - b).abs_().sum(-1) / 2
    found["rank_correlation"] = _rank_correlation(b, a, seen_NS)
    entropies = []
    for rows_NS, prefix, is_distribution in zip(
        (b, a), ("", "anchor_"), are_distributions, strict=True
    ):
        if is_distribution:
            entropy, count = _entropy(rows_NS), (rows_NS != 0).sum(-1)
            found[f"{prefix}entropy"] = entropy[count > 0]
            found[f"{prefix}unevenness"] = (count.to(entropy).log() - entropy)[count > 1]
            entropies.append(entropy)
    if all(are_distributions):
        crossed = -torch.xlogy(a, b).sum(-1)
        found["kl_divergence"] = (crossed - entropies[1]).clamp_(min=0.0)
        apart = _entropy((a + b) / 2) - (entropies[0] + entropies[1]) / 2
        found["js_divergence"] = apart.clamp_(min=0.0)
    return found


def _entropy(rows_NS: Tensor) -> Tensor:
    return (0.0 - torch.xlogy(rows_NS, rows_NS).sum(-1)).clamp_(min=0.0)


def _rank_correlation(b_NS: Tensor, a_NS: Tensor, seen_NS: Tensor) -> Tensor:
    """Pearson's of the ranks; where one side has but one rank there is none."""
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
    return (covaries[has_order] / varies[has_order].sqrt()).clamp(-1.0, 1.0)


def _ranks(x_NS: Tensor) -> Tensor:
    """From 0 on; those that tie share the mean of theirs."""
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
