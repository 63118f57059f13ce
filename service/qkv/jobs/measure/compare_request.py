"""A validated request to compare variants: the runs of each variant, and the checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Final, NamedTuple

import pydantic

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, PayloadTooLarge, QkvError, pointer_to
from qkv.jobs.fields import INTEGER, LayerField, field_error
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.variant_choice import MAX_VARIANTS, VariantChoice
from qkv.jobs.weight_forms import FULL, WeightForm, query_axis
from qkv.tensors import RawTensor, nbytes
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype

_MAX_HEADS: Final = 4096  # of all variants of a comparison that has figures of each head
_PART_SCORES: Final = 1 << 22  # compared at once, in about a second of one thread
_PART_SHARE: Final = 4  # of the bytes of a job that the weights of such a part may take
_SHORT_ROW: Final = 16  # scores that take as much memory as the metrics of their row
_NEIGHBOURS: Final = 16  # adjacent rows in a range, if not all rows are compared
_HEAD_BYTES: Final = 1024  # of a head in the response, at most

_TAKEN_BY_ALL: Final = ("mask", "key_lengths")
"""Inputs that every variant must take, because a variant without them computes something else."""
_HEADS: Final = ("H", "G")  # letters of an axis of heads


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


class CompareEntry(NamedTuple):
    """A variant that is compared, or the baseline.

    Attributes:
        choice: the variant.
        plan: the run of its output, alone.
        tensors, layer: of that run.
    """

    choice: VariantChoice
    plan: Plan
    tensors: Mapping[str, RawTensor]
    layer: Layer | None

    def rows_plan(self, rows: Sequence[int]) -> Plan:
        """Returns the run, in float64, of some rows of the weights in every head.

        If each item is one row, it is the run of all rows.
        """
        has_rows = query_axis(self.plan.variant.outputs["weights"]) is not None
        form = WeightForm("rows", rows=tuple(rows)) if has_rows else FULL
        fields = {**self.plan.fields, "outputs": ["weights"], "weights": form.as_json}
        plan = replace(self.plan, outputs=frozenset({"weights"}), form=form, fields=fields)
        return plan.measured(float64=True)


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
        _check_names(choices, message)
        entries: list[CompareEntry] = []
        for choice in choices:
            message = replace(message, tensors=dict(message.tensors))
            entry = self._entry(choice, message)
            # untyped tensors are cast once, for all variants
            message.tensors.update(entry.tensors)
            entries.append(entry)
        self.baseline, *self.variants = entries
        for entry in self.variants:
            _check_shapes(entry, self.baseline)
            _check_positions(entry, self.baseline)
        if self.per_head:
            self._check_heads()
        self._check_size()

    def _entry(self, choice: VariantChoice, message: Message) -> CompareEntry:
        fields = self._fields | {"parameters": choice.parameters, "outputs": ["output"]}
        selected = _select_inputs(choice.variant, replace(message, fields=fields))
        try:
            job = Job.new(Plan, choice.variant.name, selected, self._limits)
        except QkvError as error:
            choice.reraise(error)
        return CompareEntry(choice, job.plan.measured(), job.tensors, job.layer)

    @property
    def has_reference(self) -> bool:
        """True if the baseline runs in float64 too, because its inputs have another dtype."""
        return self.baseline.plan.inputs.dtype != "float64"

    @cached_property
    def rows(self) -> Sequence[int]:
        """The rows to compare in every head, in order."""
        if not all("weights" in e.plan.variant.outputs for e in (self.baseline, *self.variants)):
            return ()
        length, limit = self.row_count, self._max_rows
        if limit is None or limit >= length:
            return range(length)
        together = min(_NEIGHBOURS, limit)
        parts = limit // together if together else 0
        starts = [i * length // parts for i in range(parts)]
        return [row for start in starts for row in range(start, start + together)]

    @property
    def row_parts(self) -> Iterator[Sequence[int]]:
        """The rows to compare at once, of every head."""
        if not self.rows:  # a variant may have no weights
            return
        scores = min(_PART_SCORES, self._limits.job_bytes // (_PART_SHARE * nbytes("float64", ())))
        *planes, _, S = self._weights_shape
        size = max(1, scores // (math.prod(planes) * max(S, _SHORT_ROW)))
        for first in range(0, len(self.rows), size):
            yield self.rows[first : first + size]

    @property
    def planes(self) -> tuple[int, int]:
        """The sequences and heads whose rows are compared.

        One head if the weights have no axis of heads. Also if there are more than any response
        has figures of, because their statistics would take much more memory than the weights.
        """
        match self._weights_shape:
            case (B, H, _, _) if H <= _MAX_HEADS:
                return B, H
            case (*planes, _, _):
                return math.prod(planes), 1
        raise AssertionError

    @property
    def head_count(self) -> int:
        """Query heads of the output."""
        return _full_shape(self.baseline.plan, "output")[1]

    @property
    def head_axes(self) -> tuple[int, int, int] | None:
        """The number of elements of an output before the axis of its heads, in it, and after it.

        None if the output has no such axis: also if the layer has an output projection, which adds
        up the heads.
        """
        layer, shape = self.baseline.plan.inputs.layer, _full_shape(self.baseline.plan, "output")
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
        return _full_shape(self.baseline.plan, "weights")

    def _check_heads(self) -> None:
        """Checks that the variants have heads, and that the response has room for them."""
        for entry in (self.baseline, *self.variants):
            _check_has_heads(entry)
        heads, entries = self.head_count, 1 + len(self.variants)
        limit = min(_MAX_HEADS, self._limits.response_bytes // _HEAD_BYTES)
        if heads * entries > limit:
            raise PayloadTooLarge(
                f"per_head would give too many heads: got {heads} heads of {entries} variants, the "
                f"baseline included, {heads * entries} in total, expected at most {limit}",
                pointer="/per_head",
                limit=limit,
            )

    def _check_size(self) -> None:
        """Checks the limits that apply to the comparison and not to a single run."""
        limits, wide = self._limits, self.baseline.plan.measured(float64=True)
        if (size := wide.bytes) > limits.job_bytes:
            raise PayloadTooLarge(
                "the float64 run of the baseline, which measures its error, is too large: got "
                f"{size} bytes of tensors, expected at most {limits.job_bytes}",
                limit=limits.job_bytes,
            )
        if not self.rows:
            return
        *planes, _, S = self._weights_shape
        if (pairs := math.prod(planes) * S * len(self.rows)) > limits.score_count:
            raise PayloadTooLarge(
                f"too many weights to compare: got {pairs} of each variant, expected at most "
                f"{limits.score_count}; send a smaller `rows`",
                pointer="/rows",
                limit=limits.score_count,
            )
        largest, entries = next(self.row_parts), (self.baseline, *self.variants)
        if (size := max(e.rows_plan(largest).bytes for e in entries)) > limits.job_bytes:
            raise PayloadTooLarge(
                "a row of the weights of every head is too large to compare: got "
                f"{size} bytes with the inputs, expected at most {limits.job_bytes}; send 0 as "
                "`rows`",
                pointer="/rows",
                limit=limits.job_bytes,
            )


def _check_names(choices: Sequence[VariantChoice], message: Message) -> None:
    """Checks that a variant takes every input, and that all take those in `_TAKEN_BY_ALL`."""
    for name in message.tensors:
        takers = [c for c in choices if name in _select_inputs(c.variant, message).tensors]
        pointer = pointer_to("inputs", name)
        if not takers:
            listed = ", ".join(dict.fromkeys(c.variant.name for c in choices))
            raise InvalidContent(f"none of {listed} has an input {name!r:.60}", pointer=pointer)
        if name in _TAKEN_BY_ALL:
            for choice in choices:
                if choice not in takers:
                    hint = (
                        "; to hide padding from all of them, give key_lengths"
                        if name == "mask" and "key_lengths" in choice.variant.inputs
                        else ""
                    )
                    raise InvalidContent(
                        f"{choice.variant.name} takes no {name}: without it, the variant computes "
                        f"something else than the others{hint}",
                        pointer=pointer,
                    )


def _check_shapes(entry: CompareEntry, baseline: CompareEntry) -> None:
    """Checks that output and weights have the same shapes as the baseline's."""
    for name in ("output", "weights"):
        if not all(name in e.plan.variant.outputs for e in (entry, baseline)):
            continue  # a variant may have no weights
        shape = _full_shape(entry.plan, name)
        baseline_shape = _full_shape(baseline.plan, name)
        if shape != baseline_shape:
            raise InvalidContent(
                f"{entry.choice.variant.name} cannot be compared: its {name} has shape "
                f"{list(shape)}, expected {list(baseline_shape)} as the baseline "
                f"({baseline.choice.variant.name}) has",
                pointer=entry.choice.pointer,
            )


def _check_has_heads(entry: CompareEntry) -> None:
    """Checks that output and weights of a variant have the same axis of heads.

    Raises:
        InvalidContent: one of them has none, or the axes differ.
    """
    variant = entry.plan.variant
    heads = next((x for x in variant.outputs["output"].letters[1:2] if x in _HEADS), "H")
    for name, axes in (("output", f"B, {heads}, L, E"), ("weights", f"B, {heads}, L, S")):
        if name not in variant.outputs:
            continue  # a variant may have no weights
        letters = variant.outputs[name].letters
        if len(letters) != 4 or letters[1] != heads:
            raise InvalidContent(
                f"per_head is not supported by {variant.name}: its {name} has axes "
                f"({', '.join(letters)}), expected ({axes})",
                pointer="/per_head",
            )


def _check_positions(entry: CompareEntry, baseline: CompareEntry) -> None:
    """Checks that a rotary layer gives both variants the same queries.

    Raises:
        InvalidContent: the positions of the queries differ.
    """
    layer = entry.plan.inputs.layer
    if layer is None or layer.options.rope is None:
        return
    offset, baseline_offset = (e.plan.arguments.get("query_offset", 0) for e in (entry, baseline))
    if offset != baseline_offset:
        raise InvalidContent(
            f"{entry.choice.variant.name} cannot be compared: its query_offset is {offset}, "
            f"expected {baseline_offset} as the baseline ({baseline.choice.variant.name}) has, "
            "because the layer rotates queries by their position",
            pointer=entry.choice.pointer,
        )


def _full_shape(plan: Plan, output: str) -> tuple[int, ...]:
    """Returns the shape of an output with every axis."""
    letters = plan.variant.outputs[output].letters
    return tuple(plan.inputs.axes.sizes[letter] for letter in letters)


def _select_inputs(variant: Variant, message: Message) -> Message:
    """Returns the message with only the tensors that the variant or its layer takes."""
    names = set(variant.inputs)
    if message.fields.get("layer") is not None and names & set(ROLES):
        names.add("x")
    return replace(message, tensors={n: t for n, t in message.tensors.items() if n in names})
