"""The plan of a job that compares a variant's weights row by row with those of a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

import pydantic
import torch
from torch import Tensor

from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from qkv.jobs.inputs import Inputs
from qkv.jobs.measure.head_stats import (
    HEAD_STATS,
    BlockValues,
    merge_head_stats,
    new_head_stats,
)
from qkv.jobs.measure.probe_plans import float64_arguments
from qkv.jobs.measure.row_metrics import ROW_METRICS, RunningStats, row_metrics
from qkv.jobs.plan import Plan
from qkv.wire.message import Message

__all__ = ["Baseline", "RowDivergencePlan", "compare_rows", "select_inputs"]

_BLOCK: Final = 1 << 22  # elements of a block of rows of either matrix
_PART: Final = 1 << 20  # elements of a part of a block, whose metrics are computed at once
_SHORT_ROW: Final = 16  # elements that take as much memory as the metrics of their row
_PAIR_FLOPS: Final = 256  # floating-point operations per pair, mostly for sorting


class Baseline(NamedTuple):
    """The variant that other variants are compared with."""

    variant: Variant
    parameters: pydantic.BaseModel

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters by name, as the variant's functions take them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}


@dataclass(frozen=True, eq=False, kw_only=True)
class RowDivergencePlan(Plan):
    """A comparison that returns the `RunningStats` of each of `ROW_METRICS`.

    Attributes:
        inputs: those of the variant and of the baseline.
        outputs: empty.
        baseline: the variant to compare with; its weights have the same shape.
        rows: the ranges of rows to compare, in every head.
        per_head: `HEAD_STATS` are returned too. The weights have axes (B, H, L, S).
    """

    is_inference: ClassVar[bool] = False

    baseline: Baseline
    rows: Sequence[tuple[int, int]]
    per_head: bool = False

    @classmethod
    def of(
        cls, plan: Plan, baseline: Plan, rows: Sequence[tuple[int, int]], *, per_head: bool = False
    ) -> RowDivergencePlan:
        """Returns the comparison of the weights of two runs."""
        return cls(
            plan.variant,
            plan.parameters,
            _merge(plan.inputs, baseline.inputs),
            frozenset(),
            baseline=Baseline(baseline.variant, baseline.parameters),
            rows=rows,
            per_head=per_head,
        )

    @cached_property
    def runs_alone(self) -> bool:
        """Always true."""
        return True

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Four numbers for each metric, and as many for each head if requested."""
        four = len(RunningStats._fields)
        specs: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(
            ROW_METRICS, ("float64", (four,))
        )
        if self.per_head:
            specs[HEAD_STATS] = "float64", (len(ROW_METRICS), self.weights_shape[1], four)
        return specs

    @cached_property
    def flops(self) -> int:
        """An estimate, because sorting the rows costs far more than the matrix products."""
        return _PAIR_FLOPS * self.score_count

    @cached_property
    def score_count(self) -> int:
        """Elements of each matrix that are compared."""
        *planes, _, S = self.weights_shape
        return math.prod(planes) * S * sum(last - first for first, last in self.rows)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """The shape of either matrix with every axis."""
        letters = self.variant.outputs["weights"].letters
        return tuple(self.inputs.axes.sizes[letter] for letter in letters)

    @property
    def roles(self) -> tuple[str, ...]:
        """The projected inputs of both variants."""
        either = {*self.variant.inputs, *self.baseline.variant.inputs}
        return tuple(role for role in ROLES if role in either)

    @property
    def uses_sdpa(self) -> bool:
        """Always false: the job computes weights."""
        return False


def _merge(inputs: Inputs, others: Inputs) -> Inputs:
    """Returns the inputs of both."""
    return inputs._replace(
        specs={**others.specs, **inputs.specs},
        dtypes={**others.dtypes, **inputs.dtypes},
        sent_shapes={**others.sent_shapes, **inputs.sent_shapes},
        shapes={**others.shapes, **inputs.shapes},
    )


def select_inputs(variant: Variant, message: Message) -> Message:
    """Returns the message with only the tensors that the variant or its layer takes."""
    names = set(variant.inputs)
    if message.fields.get("layer") is not None and names & set(ROLES):
        names.add("x")
    return replace(message, tensors={n: t for n, t in message.tensors.items() if n in names})


def compare_rows(plan: RowDivergencePlan, projected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compares the rows block by block in float64, so that rounding does not matter.

    Args:
        job: the plan.
        projected: tensors by name with every axis, in float64, projected by the layer.
    """
    baseline = plan.baseline
    pair = (
        (plan.variant, plan.parameters, plan.arguments),
        (baseline.variant, *baseline[1:], baseline.arguments),
    )
    blocks = [
        _row_block_function(variant, projected, arguments, plan.inputs.dtype)
        for variant, _, arguments in pair
    ]
    inputs = plan.inputs.names
    kinds = [v.weights_are(parameters, inputs) == "stochastic" for v, parameters, _ in pair]
    stats = _RowStats(plan, (kinds[0], kinds[1]))
    *planes, _, S = plan.weights_shape
    # metrics of short rows need more memory than the rows
    limit = max(1, _BLOCK // (math.prod(planes) * max(S, _SHORT_ROW)))
    for first, last in plan.rows:
        for start in range(first, last, limit):
            rows = slice(start, min(last, start + limit))
            variant_NS, baseline_NS = (block(rows).flatten(0, -2) for block in blocks)
            stats.add(variant_NS, baseline_NS)
    return stats.tensors()


class _RowStats:
    """The statistics of the rows of a plan.

    Args:
        job: the plan.
        are_distributions: as `row_metrics` takes them.
    """

    def __init__(self, plan: RowDivergencePlan, are_distributions: tuple[bool, bool]) -> None:
        self._are_distributions = are_distributions
        self._total = dict.fromkeys(ROW_METRICS, RunningStats())
        self._planes = (plan.weights_shape[0], plan.weights_shape[1]) if plan.per_head else None
        self._heads = new_head_stats(plan.weights_shape[1] if plan.per_head else 0)

    def add(self, variant_NS: Tensor, baseline_NS: Tensor) -> None:
        """Adds a block of rows of every head."""
        N, S = variant_NS.shape
        block: BlockValues | None = None
        if self._planes is not None:
            block = BlockValues(self._planes, N // math.prod(self._planes), variant_NS.device)
        # one row of all heads may be longer than _PART
        for part in range(0, N, step := max(1, _PART // S)):
            some = slice(part, part + step)
            found = row_metrics(variant_NS[some], baseline_NS[some], self._are_distributions)
            self._total = {
                name: stats.merge(RunningStats.from_values(found.values[name]))
                for name, stats in self._total.items()
            }
            if block is not None:
                block.put(found, part)
        if block is not None:
            self._heads = merge_head_stats(self._heads, block.stats())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the outputs of the comparison."""
        outputs = {
            name: torch.tensor(stats, dtype=torch.float64) for name, stats in self._total.items()
        }
        if self._planes is not None:
            outputs[HEAD_STATS] = self._heads
        return outputs


def _row_block_function(
    variant: Variant, projected: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> Callable[[slice], Tensor]:
    """Returns the function that computes a block of rows of a variant's weights."""
    return variant.row_block_function(float64_arguments(variant, projected, parameters, dtype))
