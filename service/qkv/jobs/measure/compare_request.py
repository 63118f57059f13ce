"""A validated request to compare variants, and the jobs of the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Final

import pydantic

from qkv.errors import PayloadTooLarge, QkvError
from qkv.jobs.fields import INTEGER, LayerField, field_error
from qkv.jobs.job import Job
from qkv.jobs.measure.compare_entry import (
    CompareEntry,
    check_has_heads,
    check_names,
    check_positions,
    check_shapes,
    full_shape,
)
from qkv.jobs.measure.row_divergence import MAX_HEADS, RowDivergencePlan, select_inputs
from qkv.jobs.measure.variant_choice import MAX_VARIANTS, VariantChoice
from qkv.jobs.plan import Limits, Plan
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype

__all__ = ["CompareFields", "CompareRequest"]

_JOB_SCORES: Final = 1 << 22  # compared by one job, in about a second of one thread
_NEIGHBOURS: Final = 16  # adjacent rows in a range, if not all rows are compared
_HEAD_BYTES: Final = 1024  # of a head in the response, at most


class CompareFields(pydantic.BaseModel):
    """The fields of a compare request, without its tensors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Annotated[
        list[Any],
        pydantic.Field(
            min_length=1, max_length=MAX_VARIANTS, description="The variants to compare, in order."
        ),
    ]
    anchor: Annotated[
        Any, pydantic.Field(description="The variant that the others are compared with.")
    ] = "softmax"
    repeats: Annotated[
        int,
        pydantic.Field(ge=1, le=100, description="The timed runs of each variant. They alternate."),
        INTEGER,
    ] = 5
    rows: Annotated[
        Annotated[int, pydantic.Field(ge=0), INTEGER] | None,
        pydantic.Field(
            description="The largest number of rows of each head whose weights are compared, "
            "evenly spread. null compares all rows, 0 compares none."
        ),
    ] = 1024
    per_head: Annotated[
        bool, pydantic.Field(description="If true, each variant has figures for each query head.")
    ] = False
    dtype: Annotated[
        FloatingDtype | None,
        pydantic.Field(
            description="The dtype of tensors that are sent as lists of numbers. By default "
            "float32."
        ),
    ] = None
    layer: LayerField = None


class CompareRequest:
    """A validated request to compare variants.

    Args:
        message: inputs, and the fields of `CompareFields`.
        limits: the limits of each job.
        fields: of the message, validated; None validates them.

    Attributes:
        baseline: the variant that the others are compared with, the field `anchor` of the request.
        variants: the variants to compare.
        repeats: timed runs of each variant.
        per_head: the report has figures for each query head.

    Raises:
        QkvError: an error of `Plan.from_message`, or the variants cannot be compared.
    """

    def __init__(
        self, message: Message, limits: Limits, fields: CompareFields | None = None
    ) -> None:
        try:
            fields = fields or CompareFields.model_validate(message.fields)
        except pydantic.ValidationError as error:
            known = ["inputs", *CompareFields.model_fields, "encoding"]
            raise field_error(error, known) from None
        self.repeats, self._max_rows, self._limits = fields.repeats, fields.rows, limits
        self.per_head = fields.per_head
        self._fields = {"dtype": fields.dtype or "float32", "layer": message.fields.get("layer")}
        choices = [VariantChoice.parse(fields.anchor, "anchor")]
        choices += [
            VariantChoice.parse(value, "variants", i) for i, value in enumerate(fields.variants)
        ]
        check_names(choices, message)
        entries: list[CompareEntry] = []
        for choice in choices:
            message = replace(message, tensors=dict(message.tensors))
            entry = self._entry(choice, message)
            # untyped tensors are cast once, for all variants
            message.tensors.update(entry.timing.tensors)
            entries.append(entry)
        self.baseline, *self.variants = entries
        for entry in self.variants:
            check_shapes(entry, self.baseline)
            check_positions(entry, self.baseline)
        if self.per_head:
            self._check_heads()
        self._check_size()

    def _entry(self, choice: VariantChoice, message: Message) -> CompareEntry:
        fields = self._fields | {"parameters": choice.parameters, "outputs": ["output"]}
        selected = select_inputs(choice.variant, replace(message, fields=fields))
        try:
            job = Job.new(Plan, choice.variant.name, selected, self._limits)
        except QkvError as error:
            choice.reraise(error)
        return CompareEntry.of(choice, job)

    @property
    def has_float64_job(self) -> bool:
        """True if the baseline runs in float64 too, because its inputs have another dtype."""
        return self.baseline.plan.inputs.dtype != "float64"

    @property
    def float64_job(self) -> Job:
        """The baseline's run on the same inputs in float64."""
        timed = self.baseline.timing
        return Job(timed.plan.measured("float64"), timed.tensors, timed.layer)

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """The ranges of rows to compare, in order."""
        if not all("weights" in e.plan.variant.outputs for e in (self.baseline, *self.variants)):
            return []
        length, limit = self.row_count, self._max_rows
        if limit is None or limit >= length:
            return [(0, length)]
        together = min(_NEIGHBOURS, limit)
        parts = limit // together if together else 0
        starts = [i * length // parts for i in range(parts)]
        return [(start, start + together) for start in starts]

    def divergence_jobs(self, entry: CompareEntry) -> Iterator[Job]:
        """Yields short jobs that compare a variant's weights with the baseline's."""
        if not self.rows:
            return
        job, baseline = entry.timing, self.baseline.timing
        *planes, _, S = self._weights_shape
        limit = max(1, _JOB_SCORES // (math.prod(planes) * S))
        cut = [
            (start, min(last, start + limit))
            for first, last in self.rows
            for start in range(first, last, limit)
        ]
        while cut:
            size = count = 0
            while count < len(cut) and (size == 0 or size + _length(cut[count]) <= limit):
                size += _length(cut[count])
                count += 1
            part, cut = cut[:count], cut[count:]
            plan = RowDivergencePlan.of(job.plan, baseline.plan, part)
            yield Job(plan, {**baseline.tensors, **job.tensors}, job.layer)

    @property
    def head_count(self) -> int:
        """Query heads of the output."""
        return full_shape(self.baseline.plan, "output")[1]

    @property
    def head_axes(self) -> tuple[int, int, int] | None:
        """The number of elements of an output before the axis of its heads, in it, and after it.

        None if the output has no such axis: also if the layer has an output projection, which adds
        up the heads.
        """
        layer, shape = self.baseline.plan.inputs.layer, full_shape(self.baseline.plan, "output")
        if len(shape) != 4 or (layer is not None and layer.output_width is not None):
            return None
        B, H, L, E = shape
        return (B, H, L * E) if layer is None else (B * L, H, E)

    @property
    def head_bytes(self) -> int:
        """The most bytes of the figures of all heads in the response; 0 without `per_head`."""
        return self.head_count * (1 + len(self.variants)) * _HEAD_BYTES if self.per_head else 0

    @property
    def row_count(self) -> int:
        """Rows of the weights of each head."""
        return self._weights_shape[-2]

    @property
    def _weights_shape(self) -> tuple[int, ...]:
        return full_shape(self.baseline.plan, "weights")

    def _check_heads(self) -> None:
        """Checks that the variants have heads, and that the response has room for them."""
        for entry in (self.baseline, *self.variants):
            check_has_heads(entry)
        heads, entries = self.head_count, 1 + len(self.variants)
        limit = min(MAX_HEADS, self._limits.response_bytes // _HEAD_BYTES)
        if heads * entries > limit:
            raise PayloadTooLarge(
                f"per_head would give too many heads: got {heads} heads of {entries} variants, the "
                f"baseline included, {heads * entries} in total, expected at most {limit}",
                pointer="/per_head",
                limit=limit,
            )

    def _check_size(self) -> None:
        """Checks the limits that apply to the comparison and not to a single run."""
        limits, wide = self._limits, self.float64_job.plan
        if (size := wide.bytes) > limits.job_bytes:
            raise PayloadTooLarge(
                "the float64 run of the baseline, which measures its error, is too large: got "
                f"{size} bytes of tensors, expected at most {limits.job_bytes}",
                limit=limits.job_bytes,
            )
        if not self.rows:
            return
        *planes, _, S = self._weights_shape
        pairs = math.prod(planes) * S * sum(map(_length, self.rows))
        if pairs > limits.score_count:
            raise PayloadTooLarge(
                f"too many weights to compare: got {pairs} of each variant, expected at most "
                f"{limits.score_count}; send a smaller `rows`",
                pointer="/rows",
                limit=limits.score_count,
            )


def _length(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]
