"""The running statistics of row metrics, one for each head."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from qkv.jobs.measure.row_metrics import ROW_METRICS, RowMetrics, RunningStats

__all__ = ["HEAD_STATS", "BlockValues", "head_stats_of", "merge_head_stats", "new_head_stats"]

HEAD_STATS: Final = "heads"
"""The output of a `RowDivergencePlan` with the statistics of each head, (metrics, H, 4).

The four are the fields of `RunningStats`."""


class BlockValues:
    """The metrics of a block of rows of every head, at the places of their rows.

    A reduction of each head needs places, because a metric has no value for some rows.

    Args:
        planes: (B, H).
        rows: of each head.
        device: of the values.
    """

    def __init__(self, planes: tuple[int, int], rows: int, device: torch.device) -> None:
        self._shape = (*planes, rows)
        size = len(ROW_METRICS), math.prod(self._shape)
        self._values_MN = torch.zeros(size, dtype=torch.float64, device=device)
        self._has_MN = torch.zeros(size, dtype=torch.bool, device=device)

    def put(self, metrics: RowMetrics, first: int) -> None:
        """Adds the metrics of a part of the block, whose first row is `first`."""
        for name, places in metrics.places().items():
            metric, rows = ROW_METRICS.index(name), places + first
            self._values_MN[metric, rows] = metrics.values[name]
            self._has_MN[metric, rows] = True

    def stats(self) -> Tensor:
        """Returns the statistics of each head, (metrics, H, 4), on the CPU."""
        found = []
        for values_N, has_N in zip(self._values_MN, self._has_MN, strict=True):
            values_BHR, has_BHR = values_N.view(self._shape), has_N.view(self._shape)
            four = (
                has_BHR.sum((0, 2), dtype=torch.float64),
                values_BHR.sum((0, 2)),
                values_BHR.masked_fill(~has_BHR, math.inf).amin((0, 2)),
                values_BHR.masked_fill(~has_BHR, -math.inf).amax((0, 2)),
            )
            found.append(torch.stack(four, -1))
        return torch.stack(found).cpu()


def new_head_stats(heads: int) -> Tensor:
    """Returns the statistics of no rows, (metrics, H, 4)."""
    none = torch.tensor(RunningStats(), dtype=torch.float64)
    return none.expand(len(ROW_METRICS), heads, -1).contiguous()


def merge_head_stats(one: Tensor, other: Tensor) -> Tensor:
    """Returns the statistics over the rows of both, (metrics, H, 4)."""
    return torch.cat(
        [
            one[..., :2] + other[..., :2],
            torch.minimum(one[..., 2:3], other[..., 2:3]),
            torch.maximum(one[..., 3:], other[..., 3:]),
        ],
        -1,
    )


def head_stats_of(stats: Tensor) -> list[dict[str, RunningStats]]:
    """Returns the statistics of each head by the names in `ROW_METRICS`."""
    return [
        {name: RunningStats(*four) for name, four in zip(ROW_METRICS, head, strict=True)}
        for head in stats.transpose(0, 1).tolist()
    ]
