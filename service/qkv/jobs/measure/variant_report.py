"""The measurements of a variant in a comparison, and its figures in the response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.output_error import sum_errors
from qkv.jobs.measure.row_stats import (
    NO_ROWS,
    ROW_STATS,
    RunningStats,
    by_head,
    merge,
    merge_heads,
)
from qkv.tensors import RawTensor
from qkv.wire.responses import (
    BaselineWeights,
    Divergence,
    Entropy,
    OutputError,
    WeightsComparison,
)

__all__ = ["VariantReport", "baseline_weights", "compared_weights"]


class VariantReport:
    """The measurements of a variant.

    Args:
        request: the comparison.

    Attributes:
        times_ms: compute time of each timed run.
        notes: on the numbers of a run.
        peak_bytes: peak memory of a run.
        output_error: the error of the output; None if there is no reference.
        head_errors: the error of each head of the output; empty if it is unknown.
    """

    def __init__(self, request: CompareRequest) -> None:
        self.times_ms: list[float] = []
        self.notes: Sequence[str] = ()
        self.peak_bytes = 0
        self.output_error: OutputError | None = None
        self.head_errors: Sequence[OutputError | None] = ()
        self._request = request
        self._stats = NO_ROWS

    def measure_error(self, output: RawTensor, reference: RawTensor) -> None:
        """Measures the error of the output, and that of each head if requested."""
        axes = self._request.head_axes
        sums = sum_errors(output, reference, axes)
        self.output_error = sums.whole()
        if self._request.per_head and axes is not None:
            self.head_errors = sums.heads()

    def add_rows(self, outputs: Mapping[str, RawTensor]) -> None:
        """Adds the outputs of a `RowDivergencePlan`."""
        self._stats = merge(self._stats, torch.tensor(outputs[ROW_STATS].numpy()))

    def take_baseline_rows(self, other: VariantReport) -> None:
        """Takes the statistics of the baseline from the report of a variant that has them."""
        self.row_stats |= _baseline_stats(other.row_stats)
        self.head_row_stats = list(map(_baseline_stats, other.head_row_stats))

    @cached_property
    def row_stats(self) -> dict[str, RunningStats]:
        """Statistics of the weights of the variant and of the baseline, by metric."""
        return by_head(merge_heads(self._stats))[0]

    @cached_property
    def head_row_stats(self) -> list[dict[str, RunningStats]]:
        """The attribute `row_stats` of each head; empty without `per_head`."""
        if not self._request.per_head:
            return []
        return by_head(self._stats.expand(-1, self._request.head_count, -1))

    @property
    def heads(self) -> list[tuple[OutputError | None, Mapping[str, RunningStats]]]:
        """The error of each head, if known, and its `row_stats`; empty without `per_head`."""
        errors = self.head_errors or [None] * len(self.head_row_stats)
        return list(zip(errors, self.head_row_stats, strict=True))


def _baseline_stats(row_stats: Mapping[str, RunningStats]) -> dict[str, RunningStats]:
    return {name: row_stats[f"baseline_{name}"] for name in ("entropy", "unevenness")}


def baseline_weights(stats: Mapping[str, RunningStats]) -> BaselineWeights:
    """Returns the figures of rows of the baseline's weights.

    Args:
        stats: of the metrics, by name.
    """
    return BaselineWeights(entropy=_entropy(stats))


def compared_weights(stats: Mapping[str, RunningStats]) -> WeightsComparison:
    """Returns the figures of rows of a variant's weights; `stats` as for `baseline_weights`."""
    return WeightsComparison(
        total_variation=_divergence(stats["total_variation"], "most"),
        kl_divergence=_divergence(stats["kl_divergence"], "most"),
        js_divergence=_divergence(stats["js_divergence"], "most"),
        rank_correlation=_divergence(stats["rank_correlation"], "least"),
        entropy=_entropy(stats),
    )


def _divergence(stats: RunningStats, worst: str) -> Divergence | None:
    values = _finite_stats(stats, worst)
    return None if values is None else Divergence(mean=values[0], worst=values[1])


def _entropy(stats: Mapping[str, RunningStats]) -> Entropy | None:
    values = _finite_stats(stats["entropy"], "least", "most")
    if values is None:
        return None
    mean, least, most = values
    return Entropy(mean=mean, least=least, most=most)


def _finite_stats(stats: RunningStats, *names: str) -> list[float] | None:
    """Returns the mean and the named statistics; None if one is not finite or there are no rows."""
    values = [stats.mean, *(getattr(stats, name) for name in names)]
    return values if all(map(math.isfinite, values)) else None
