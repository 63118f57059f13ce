"""A job that compares a variant's weights row by row with those of a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import pydantic
import torch
from torch import Tensor

from qkv.attention import catalogue
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from qkv.jobs.fields import JobFields, parse_fields
from qkv.jobs.inputs import Inputs
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import float64_arguments
from qkv.jobs.measure.row_metrics import ROW_METRICS, RunningStats, row_metrics
from qkv.wire.message import Message

__all__ = ["Baseline", "RowDivergenceJob", "compare_rows", "select_inputs"]

_BLOCK: Final = 1 << 22  # elements of a block of rows of either matrix
_PART: Final = 1 << 20  # elements of a part of a block, whose metrics are computed at once
_PAIR_FLOPS: Final = 256  # floating-point operations per pair, mostly for sorting


class _BaselineFields(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variant: str
    parameters: dict[str, Any] = {}


class _RowDivergenceFields(JobFields):
    baseline: _BaselineFields
    rows: list[Annotated[list[int], pydantic.Field(min_length=2, max_length=2)]]


class Baseline(NamedTuple):
    """The variant that other variants are compared with."""

    variant: Variant
    parameters: pydantic.BaseModel

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters by name, as the variant's functions take them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}


@dataclass(frozen=True, eq=False, kw_only=True)
class RowDivergenceJob(Job):
    """A job that returns the `RunningStats` of each of `ROW_METRICS`.

    Attributes:
        inputs: the inputs of the variant and of the baseline.
        outputs: empty.
        baseline: the variant to compare with; its weights have the same shape.
        rows: the ranges of rows to compare, in every head.
    """

    is_inference: ClassVar[bool] = False

    baseline: Baseline
    rows: Sequence[tuple[int, int]]

    @classmethod
    def from_message(cls, variant_name: str, message: Message, limits: Limits) -> RowDivergenceJob:
        """Validates a message like `Job.from_message`, with the fields `baseline` and `rows`.

        Raises:
            QkvError: an error of `Job.from_message`.
        """
        fields = parse_fields(message, _RowDivergenceFields)
        variant, other = catalogue.find(variant_name), catalogue.find(fields.baseline.variant)
        parameters = variant.parse(fields.parameters)
        baseline = Baseline(other, other.parse(fields.baseline.parameters))
        inputs = Inputs.from_message(variant, parameters, fields, select_inputs(variant, message))
        baseline_inputs = Inputs.from_message(
            other, baseline.parameters, fields, select_inputs(other, message)
        )
        rows = [(first, last) for first, last in fields.rows]
        job = cls.from_inputs(variant, parameters, inputs, baseline, baseline_inputs, rows)
        job._check_size(limits)
        return job

    @classmethod
    def from_inputs(
        cls,
        variant: Variant,
        parameters: pydantic.BaseModel,
        inputs: Inputs,
        baseline: Baseline,
        baseline_inputs: Inputs,
        rows: Sequence[tuple[int, int]],
    ) -> RowDivergenceJob:
        """Returns the job for a variant and a baseline with validated inputs."""
        both = inputs._replace(
            tensors={**baseline_inputs.tensors, **inputs.tensors},
            shapes={**baseline_inputs.shapes, **inputs.shapes},
        )
        return cls(variant, parameters, both, frozenset(), baseline=baseline, rows=rows)

    @cached_property
    def batch_key(self) -> Hashable:
        """A unique key: the job is never stacked."""
        return id(self)

    @cached_property
    def output_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Four numbers for each metric."""
        return {name: ("float64", (len(RunningStats._fields),)) for name in ROW_METRICS}

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

    @property
    def own_fields(self) -> dict[str, Any]:
        """The fields of `from_message` that `Job.from_message` does not have."""
        parameters = self.baseline.parameters.model_dump(mode="json", exclude_unset=True)
        baseline = {"variant": self.baseline.variant.name, "parameters": parameters}
        return {"baseline": baseline, "rows": [list(each) for each in self.rows]}


def select_inputs(variant: Variant, message: Message) -> Message:
    """Returns the message with only the tensors that the variant or its layer takes."""
    names = set(variant.inputs)
    if message.fields.get("layer") is not None and names & set(ROLES):
        names.add("x")
    return replace(message, tensors={n: t for n, t in message.tensors.items() if n in names})


def compare_rows(job: RowDivergenceJob, projected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compares the rows block by block in float64, so that rounding does not matter.

    Args:
        job: the job.
        projected: tensors by name with every axis, in float64, projected by the layer.
    """
    baseline = job.baseline
    pair = (
        (job.variant, job.parameters, job.arguments),
        (baseline.variant, *baseline[1:], baseline.arguments),
    )
    blocks = [
        _row_block_function(variant, projected, arguments, job.inputs.dtype)
        for variant, _, arguments in pair
    ]
    inputs = job.inputs.names
    kinds = [v.weights_are(parameters, inputs) == "stochastic" for v, parameters, _ in pair]
    total = dict.fromkeys(ROW_METRICS, RunningStats())
    *planes, _, S = job.weights_shape
    limit = max(1, _BLOCK // (math.prod(planes) * S))
    for first, last in job.rows:
        for start in range(first, last, limit):
            rows = slice(start, min(last, start + limit))
            variant_NS, baseline_NS = (block(rows).flatten(0, -2) for block in blocks)
            # one row of all heads may be longer than _PART
            for part in range(0, len(variant_NS), step := max(1, _PART // S)):
                some = slice(part, part + step)
                values = row_metrics(variant_NS[some], baseline_NS[some], (kinds[0], kinds[1]))
                total = {n: s.merge(RunningStats.from_values(values[n])) for n, s in total.items()}
    return {name: torch.tensor(stats, dtype=torch.float64) for name, stats in total.items()}


def _row_block_function(
    variant: Variant, projected: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> Callable[[slice], Tensor]:
    """Returns the function that computes a block of rows of a variant's weights."""
    return variant.row_block_function(float64_arguments(variant, projected, parameters, dtype))
