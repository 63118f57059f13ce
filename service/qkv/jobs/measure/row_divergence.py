"""A validated job that holds rows of a variant's weights against those of an anchor's."""

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
from qkv.attention.catalogue import Variant
from qkv.attention.layers.projections import ROLES
from qkv.jobs.fields import Fields, fields_of
from qkv.jobs.inputs import Inputs
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import widened
from qkv.jobs.measure.row_metrics import FIGURES, Spread, figures
from qkv.wire.message import Message

__all__ = ["Anchor", "DivergenceJob", "divergence", "taken"]

_BLOCK: Final = 1 << 22  # elements of a block of rows of either matrix
_PART: Final = 1 << 20  # elements of those that are looked at together
_EFFORT: Final = 256  # floating-point operations that a pair costs, most of them for its rank


class _Anchor(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variant: str
    parameters: dict[str, Any] = {}


class _Fields(Fields):
    anchor: _Anchor
    rows: list[Annotated[list[int], pydantic.Field(min_length=2, max_length=2)]]


class Anchor(NamedTuple):
    """What a variant is held against."""

    variant: Variant
    parameters: pydantic.BaseModel

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters, by the names that the variant's functions give them."""
        return {n: getattr(self.parameters, n) for n in type(self.parameters).model_fields}


@dataclass(frozen=True, eq=False, kw_only=True)
class DivergenceJob(Job):
    """A job whose answer is a `Spread` for each of `spread.FIGURES`.

    Attributes:
        inputs: what the variant or the anchor takes.
        outputs: none.
        anchor: what its weights are held against; they have the same shape.
        rows: ranges of rows that are compared, of every head.
    """

    is_inference: ClassVar[bool] = False

    anchor: Anchor
    rows: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, variant_name: str, message: Message, limits: Limits) -> DivergenceJob:
        """As `Job.of`, with `anchor` and `rows` among the fields.

        Raises:
            QkvError: as `Job.of`.
        """
        fields = fields_of(message, _Fields)
        variant, named = catalogue.find(variant_name), catalogue.find(fields.anchor.variant)
        parameters = variant.parse(fields.parameters)
        anchor = Anchor(named, named.parse(fields.anchor.parameters))
        own = Inputs.of(variant, parameters, fields, taken(variant, message))
        other = Inputs.of(named, anchor.parameters, fields, taken(named, message))
        rows = [(first, last) for first, last in fields.rows]
        job = cls.between(variant, parameters, own, anchor, other, rows)
        job._check_size(limits)
        return job

    @classmethod
    def between(
        cls,
        variant: Variant,
        parameters: pydantic.BaseModel,
        own: Inputs,
        anchor: Anchor,
        other: Inputs,
        rows: Sequence[tuple[int, int]],
    ) -> DivergenceJob:
        """The job for a variant and an anchor whose inputs have been checked."""
        inputs = own._replace(
            tensors={**other.tensors, **own.tensors}, shapes={**other.shapes, **own.shapes}
        )
        return cls(variant, parameters, inputs, frozenset(), anchor=anchor, rows=rows)

    @cached_property
    def key(self) -> Hashable:
        """Its own: it runs alone."""
        return id(self)

    @cached_property
    def answers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Four numbers for each figure."""
        return {name: ("float64", (len(Spread._fields),)) for name in FIGURES}

    @cached_property
    def flops(self) -> int:
        """About what it costs: both matrices' products are little beside ordering their rows."""
        return _EFFORT * self.pairs

    @cached_property
    def pairs(self) -> int:
        """Elements of each matrix that are looked at."""
        *planes, _, S = self.weights_shape
        return math.prod(planes) * S * sum(last - first for first, last in self.rows)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """Of either matrix, every axis there."""
        letters = self.variant.outputs["weights"].letters
        return tuple(self.inputs.bound.sizes[letter] for letter in letters)

    @property
    def roles(self) -> tuple[str, ...]:
        """Those of both."""
        either = {*self.variant.inputs, *self.anchor.variant.inputs}
        return tuple(role for role in ROLES if role in either)

    @property
    def is_fused(self) -> bool:
        """Never: weights are made."""
        return False

    @property
    def asked(self) -> dict[str, Any]:
        """The fields that `of` takes and `Job.of` does not."""
        parameters = self.anchor.parameters.model_dump(mode="json", exclude_unset=True)
        anchor = {"variant": self.anchor.variant.name, "parameters": parameters}
        return {"anchor": anchor, "rows": [list(each) for each in self.rows]}


def taken(variant: Variant, message: Message) -> Message:
    """A message with those of its tensors that a variant takes; `x` where its layer makes some."""
    names = set(variant.inputs)
    if message.fields.get("layer") is not None and names & set(ROLES):
        names.add("x")
    return replace(message, tensors={n: t for n, t in message.tensors.items() if n in names})


def divergence(job: DivergenceJob, projected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compares the rows, a block at a time, in float64: what differs is the mathematics, and not
    how either rounds.

    Args:
        job: says what to compare.
        projected: tensors by name, every axis there, floats `exact`, the layer's work done.
    """
    anchor = job.anchor
    pair = (
        (job.variant, job.parameters, job.arguments),
        (anchor.variant, *anchor[1:], anchor.arguments),
    )
    blocks = [
        _blocks(variant, projected, arguments, job.inputs.dtype) for variant, _, arguments in pair
    ]
    kinds = [variant.weights_are(parameters) == "stochastic" for variant, parameters, _ in pair]
    total = dict.fromkeys(FIGURES, Spread())
    *planes, _, S = job.weights_shape
    most = max(1, _BLOCK // (math.prod(planes) * S))
    for first, last in job.rows:
        for start in range(first, last, most):
            rows = slice(start, min(last, start + most))
            variant_NS, anchor_NS = (block(rows).flatten(0, -2) for block in blocks)
            # a single row of all heads may be long
            for part in range(0, len(variant_NS), step := max(1, _PART // S)):
                part_ = slice(part, part + step)
                found = figures(variant_NS[part_], anchor_NS[part_], (kinds[0], kinds[1]))
                total = {n: s.plus(Spread.of(found[n])) for n, s in total.items()}
    return {name: torch.tensor(spread, dtype=torch.float64) for name, spread in total.items()}


def _blocks(
    variant: Variant, projected: Mapping[str, Tensor], parameters: Mapping[str, Any], dtype: str
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of a variant's weights."""
    return variant.rows_of(widened(variant, projected, parameters, dtype))
