"""The plan of a job that compares a variant's weights row by row with those of a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import pydantic
import torch
from torch import Tensor

from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from qkv.jobs.float64 import float64_arguments
from qkv.jobs.inputs import Inputs
from qkv.jobs.measure.row_metrics import ROW_METRICS, RowMetrics, row_metrics
from qkv.jobs.measure.row_stats import NO_ROWS, ROW_STATS, RunningStats, merge, reduce_rows
from qkv.jobs.plan import Plan, Task
from qkv.wire.message import Message

__all__ = ["MAX_HEADS", "Baseline", "RowDivergencePlan", "compare_rows", "select_inputs"]

_BLOCK: Final = 1 << 22  # elements of a block of rows of either matrix
MAX_HEADS: Final = 4096
"""The largest number of heads of all variants of a comparison that has figures of each head."""
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
    """A comparison that returns the `ROW_STATS` of each head.

    Attributes:
        inputs: those of the variant and of the baseline.
        outputs: empty.
        baseline: the variant to compare with; its weights have the same shape.
        compared: the plans of both runs.
        rows: the ranges of rows to compare, in every head.
    """

    task: Task = "rows"

    baseline: Baseline
    compared: tuple[Plan, Plan]
    rows: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, plan: Plan, baseline: Plan, rows: Sequence[tuple[int, int]]) -> RowDivergencePlan:
        """Returns the comparison of the weights of two runs."""
        return cls(
            plan.variant,
            plan.parameters,
            _merge(plan.inputs, baseline.inputs),
            frozenset(),
            baseline=Baseline(baseline.variant, baseline.parameters),
            compared=(plan, baseline),
            rows=rows,
        )

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Four numbers for each metric and head."""
        shape = len(ROW_METRICS), self.planes[1], len(RunningStats._fields)
        return {ROW_STATS: ("float64", shape)}

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
    def planes(self) -> tuple[int, int]:
        """The sequences and heads whose rows are compared.

        One head if the weights have no axis of heads. Also if there are more than any response
        has figures of, because their statistics would take much more memory than the weights.
        """
        match self.weights_shape:
            case (B, H, _, _) if H <= MAX_HEADS:
                return B, H
            case (*planes, _, _):
                return math.prod(planes), 1
        raise AssertionError

    @property
    def roles(self) -> tuple[str, ...]:
        """The projected inputs of both variants."""
        either = {*self.variant.inputs, *self.baseline.variant.inputs}
        return tuple(role for role in ROLES if role in either)


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
    stats = NO_ROWS
    planes, S = plan.planes, plan.weights_shape[-1]
    # metrics of short rows need more memory than the rows
    limit = max(1, _BLOCK // (math.prod(planes) * max(S, _SHORT_ROW)))
    for first, last in plan.rows:
        for start in range(first, last, limit):
            rows = slice(start, min(last, start + limit))
            variant_NS, baseline_NS = (block(rows).flatten(0, -2) for block in blocks)
            metrics = _metrics_by_parts(variant_NS, baseline_NS, (kinds[0], kinds[1]))
            stats = merge(stats, reduce_rows(metrics, planes))
    return {ROW_STATS: stats}


def _metrics_by_parts(
    variant_NS: Tensor, baseline_NS: Tensor, are_distributions: tuple[bool, bool]
) -> RowMetrics:
    """Returns the metrics of a block, in bounded memory: one row of all heads may be long."""
    size = max(1, _PART // variant_NS.shape[1])
    parts = [
        row_metrics(variant, baseline, are_distributions)
        for variant, baseline in zip(variant_NS.split(size), baseline_NS.split(size), strict=True)
    ]
    values, has = zip(*parts, strict=True)
    return RowMetrics(torch.cat(values, -1), torch.cat(has, -1))


def _row_block_function(
    variant: Variant, projected: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> Callable[[slice], Tensor]:
    """Returns the function that computes a block of rows of a variant's weights."""
    return variant.row_block_function(float64_arguments(variant, projected, parameters, dtype))
