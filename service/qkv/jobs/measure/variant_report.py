"""The measurements of a variant in a comparison, and its figures in the response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.head_errors import measure_head_errors
from qkv.jobs.measure.head_stats import (
    HEAD_STATS,
    head_stats_of,
    merge_head_stats,
    new_head_stats,
)
from qkv.jobs.measure.output_error import measure_output_error
from qkv.jobs.measure.row_metrics import ROW_METRICS, RunningStats
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
        peak_bytes: peak memory of a run.
        output_error: the error of the output; None if there is no reference.
        row_stats: statistics of the weights of the variant and of the baseline.
        head_errors: the error of each head of the output; empty if it is unknown.
    """

    def __init__(self, request: CompareRequest) -> None:
        self.times_ms: list[float] = []
        self.peak_bytes = 0
        self.output_error: OutputError | None = None
        self.row_stats = dict.fromkeys(ROW_METRICS, RunningStats())
        self.head_errors: Sequence[OutputError | None] = ()
        self._head_axes = request.head_axes if request.per_head else None
        self._head_stats = new_head_stats(request.head_count) if request.per_head else None

    def measure_error(self, output: RawTensor, reference: RawTensor) -> None:
        """Measures the error of the output, and that of each head if requested."""
        self.output_error = measure_output_error(output, reference)
        if self._head_axes is not None:
            self.head_errors = measure_head_errors(output, reference, self._head_axes)

    def add_rows(self, outputs: Mapping[str, RawTensor]) -> None:
        """Adds the outputs of a `RowDivergencePlan`."""
        for name in ROW_METRICS:
            found = RunningStats(*outputs[name].numpy().tolist())
            self.row_stats[name] = self.row_stats[name].merge(found)
        if self._head_stats is not None:
            found_MH4 = torch.tensor(outputs[HEAD_STATS].numpy())
            self._head_stats = merge_head_stats(self._head_stats, found_MH4)

    def take_baseline_rows(self, other: VariantReport) -> None:
        """Takes the statistics of the baseline from the report of a variant that has them."""
        self.row_stats |= _baseline_stats(other.row_stats)
        self.head_row_stats = list(map(_baseline_stats, other.head_row_stats))

    @cached_property
    def head_row_stats(self) -> list[dict[str, RunningStats]]:
        """The attribute `row_stats` of each head; empty without `per_head`."""
        return [] if self._head_stats is None else head_stats_of(self._head_stats)

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
        stats: of the metrics, by the names in `ROW_METRICS`.
    """
    return BaselineWeights(_entropy(stats))


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
    return None if values is None else Divergence(*values)


def _entropy(stats: Mapping[str, RunningStats]) -> Entropy | None:
    values = _finite_stats(stats["entropy"], "least", "most")
    return None if values is None else Entropy(*values)


def _finite_stats(stats: RunningStats, *names: str) -> list[float] | None:
    """Returns the mean and the named statistics; None if one is not finite or there are no rows."""
    values = [stats.mean, *(getattr(stats, name) for name in names)]
    return values if all(map(math.isfinite, values)) else None
