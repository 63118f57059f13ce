"""Running statistics of row metrics, for each head and over all heads."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.jobs.measure.row_metrics import ROW_METRICS, RowMetrics

__all__ = ["NO_ROWS", "ROW_STATS", "RunningStats", "by_head", "merge", "merge_heads", "reduce_rows"]

ROW_STATS: Final = "row_stats"
"""The output of a `RowDivergencePlan`: the statistics of each metric and head, (M, H, 4).

M are `ROW_METRICS`; the four are the fields of `RunningStats`."""


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

    @property
    def mean(self) -> float:
        """The mean; NaN if there are no rows."""
        return self.total / self.rows if self.rows else math.nan


NO_ROWS: Final = torch.tensor(RunningStats(), dtype=torch.float64).expand(len(ROW_METRICS), 1, -1)
"""The statistics of no rows, for any number of heads, (M, 1, 4)."""


def reduce_rows(metrics: RowMetrics, planes: tuple[int, int]) -> Tensor:
    """Returns the statistics of each head, (M, H, 4), on the CPU.

    Args:
        metrics: of equally many rows of each head of each sequence, (B, H, R) flattened.
        planes: B and H.
    """
    shape = len(ROW_METRICS), *planes, -1
    values_MBHR, has_MBHR = metrics.values_MN.view(shape), metrics.has_MN.view(shape)
    four = (
        has_MBHR.sum((1, 3), dtype=torch.float64),
        values_MBHR.masked_fill(~has_MBHR, 0.0).sum((1, 3)),
        values_MBHR.masked_fill(~has_MBHR, math.inf).amin((1, 3)),
        values_MBHR.masked_fill(~has_MBHR, -math.inf).amax((1, 3)),
    )
    return torch.stack(four, -1).cpu()


def merge(one: Tensor, other: Tensor) -> Tensor:
    """Returns the statistics (M, H, 4) over the rows of both."""
    return _merge_along(torch.stack(torch.broadcast_tensors(one, other)), 0)


def merge_heads(stats: Tensor) -> Tensor:
    """Returns the statistics over the rows of all heads, (M, 1, 4)."""
    return _merge_along(stats, 1)[:, None]


def _merge_along(stats: Tensor, axis: int) -> Tensor:
    four = (
        stats[..., :2].sum(axis),
        stats[..., 2:3].amin(axis),
        stats[..., 3:].amax(axis),
    )
    return torch.cat(four, -1)


def by_head(stats: Tensor) -> list[dict[str, RunningStats]]:
    """Returns the statistics (M, H, 4) of each head by the names in `ROW_METRICS`."""
    return [
        {name: RunningStats(*four) for name, four in zip(ROW_METRICS, head, strict=True)}
        for head in stats.transpose(0, 1).tolist()
    ]
