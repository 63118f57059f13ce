"""A validated request to compare variants: the jobs that it takes, and what is made of theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic

from qkv.errors import InvalidContent, QkvError, TooLarge, pointer_to
from qkv.jobs.fields import WHOLE, invalid_field
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import ExactJob, PeakJob, TimedJob
from qkv.jobs.measure.row_divergence import Anchor, DivergenceJob, taken
from qkv.jobs.measure.variant_choice import MOST, Choice
from qkv.wire.message import Message

__all__ = ["Comparing", "Comparison", "Contender"]

_MEANING: Final = ("mask", "key_lengths")
"""Inputs that change what attention is asked for: who has no place for them answers something
else."""
_TOGETHER: Final = 1 << 22  # pairs that one job compares: about a second of one thread
_NEIGHBOURS: Final = 16  # rows that are looked at together, where not all are


class Comparing(pydantic.BaseModel):
    """The fields of a comparison, tensors apart."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Annotated[
        list[Any],
        pydantic.Field(min_length=1, max_length=MOST, description="What to compare, in order."),
    ]
    anchor: Annotated[Any, pydantic.Field(description="What each is held against.")] = "softmax"
    repeats: Annotated[
        int,
        pydantic.Field(ge=1, le=100, description="Runs of each that are timed, in turns."),
        WHOLE,
    ] = 5
    rows: Annotated[
        Annotated[int, pydantic.Field(ge=0), WHOLE] | None,
        pydantic.Field(
            description="Rows of each head whose weights are compared, at most, evenly spread; "
            "null: all; 0: none."
        ),
    ] = 1024
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"] | None,
        pydantic.Field(description="What numbers in lists become; null: float32."),
    ] = None
    layer: Annotated[
        str | dict[str, Any] | None,
        pydantic.Field(description="A layer that projects the inputs."),
    ] = None


class Contender(NamedTuple):
    """A variant that is compared, or the anchor.

    Attributes:
        peak: run first, so that no first call is timed.
    """

    choice: Choice
    timed: TimedJob
    peak: PeakJob


class Comparison:
    """What is to be run.

    Args:
        message: inputs, and the fields of `Comparing`.
        limits: what each of its jobs may ask for.

    Attributes:
        anchor, variants: who is run.
        repeats: how often.

    Raises:
        QkvError: as `Job.of`; and where variants cannot be compared.
    """

    def __init__(self, message: Message, limits: Limits) -> None:
        try:
            asked = Comparing.model_validate(message.fields)
        except pydantic.ValidationError as error:
            known = ["inputs", *Comparing.model_fields, "encoding"]
            raise invalid_field(error, known) from None
        self.repeats, self._most_rows, self._limits = asked.repeats, asked.rows, limits
        self._fields = {"dtype": asked.dtype or "float32", "layer": asked.layer}
        choices = [Choice.of(asked.anchor, "anchor")]
        choices += [Choice.of(said, "variants", i) for i, said in enumerate(asked.variants)]
        _check_names(choices, message)
        made: list[Contender] = []
        for choice in choices:
            message = replace(message, tensors=dict(message.tensors))
            contender = self._contender(choice, message)
            # numbers without a dtype are converted once, for all
            message.tensors.update(contender.timed.inputs.tensors)
            made.append(contender)
        self.anchor, *self.variants = made
        for contender in self.variants:
            _check_shapes(contender, self.anchor)
        self._check_size()

    def _contender(self, choice: Choice, message: Message) -> Contender:
        fields = self._fields | {"parameters": choice.parameters, "outputs": ["output"]}
        own = taken(choice.variant, replace(message, fields=fields))
        try:
            timed = TimedJob.like(Job.of(choice.variant.name, own, self._limits))
        except QkvError as error:
            choice.blame(error)
        return Contender(choice, timed, PeakJob.like(timed))

    @property
    def has_exact(self) -> bool:
        """Whether there is something more exact than the anchor."""
        return self.anchor.timed.inputs.dtype != "float64"

    @property
    def exact(self) -> ExactJob:
        """The anchor's run on the same inputs in float64."""
        return ExactJob.like(self.anchor.timed)

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """The ranges of rows whose weights are compared, in order."""
        if not all("weights" in c.timed.variant.outputs for c in (self.anchor, *self.variants)):
            return []
        length, most = self.length, self._most_rows
        if most is None or most >= length:
            return [(0, length)]
        together = min(_NEIGHBOURS, most)
        parts = most // together if together else 0
        starts = [i * length // parts for i in range(parts)]
        return [(start, start + together) for start in starts]

    def divergences(self, contender: Contender) -> Iterator[DivergenceJob]:
        """The jobs that compare a variant's weights with the anchor's, none of them long."""
        if not self.rows:
            return
        own, other = contender.timed, self.anchor.timed
        *planes, _, S = self._weights_shape
        most = max(1, _TOGETHER // (math.prod(planes) * S))
        cut = [
            (start, min(last, start + most))
            for first, last in self.rows
            for start in range(first, last, most)
        ]
        while cut:
            size = count = 0
            while count < len(cut) and (size == 0 or size + _length(cut[count]) <= most):
                size += _length(cut[count])
                count += 1
            part, cut = cut[:count], cut[count:]
            yield DivergenceJob.between(
                own.variant,
                own.parameters,
                own.inputs,
                Anchor(other.variant, other.parameters),
                other.inputs,
                part,
            )

    @property
    def length(self) -> int:
        """Rows that there are, of each head."""
        return self._weights_shape[-2]

    @property
    def _weights_shape(self) -> tuple[int, ...]:
        return _shape(self.anchor.timed, "weights")

    def _check_size(self) -> None:
        """Of what is asked for beyond single runs."""
        limits, wide = self._limits, self.exact
        if (size := wide.bytes_in + wide.bytes_out) > limits.request:
            raise TooLarge(
                f"the anchor's own error is found by its output in float64, {size} bytes with its "
                f"inputs; at most {limits.request} may wait",
                limit=limits.request,
            )
        if not self.rows:
            return
        *planes, _, S = self._weights_shape
        pairs = math.prod(planes) * S * sum(map(_length, self.rows))
        if pairs > limits.scores:
            raise TooLarge(
                f"{pairs} weights of each variant would be compared; at most {limits.scores} are: "
                "`rows` says how many rows",
                pointer="/rows",
                limit=limits.scores,
            )


def _check_names(choices: Sequence[Choice], message: Message) -> None:
    """Whatever came is taken by one of them, and what changes the question by each."""
    for name in message.tensors:
        takers = [c for c in choices if name in taken(c.variant, message).tensors]
        pointer = pointer_to("inputs", name)
        if not takers:
            listed = ", ".join(dict.fromkeys(c.variant.name for c in choices))
            raise InvalidContent(f"none of {listed} has an input {name!r:.60}", pointer=pointer)
        if name in _MEANING:
            for choice in choices:
                if choice not in takers:
                    raise InvalidContent(
                        f"{choice.variant.name} takes no {name}, without which it answers another "
                        "question than those that do",
                        pointer=pointer,
                    )


def _check_shapes(contender: Contender, anchor: Contender) -> None:
    """Those of outputs and weights are the anchor's."""
    for name in ("output", "weights"):
        if not all(name in c.timed.variant.outputs for c in (contender, anchor)):
            continue  # a variant may have no weights to show
        own, other = _shape(contender.timed, name), _shape(anchor.timed, name)
        if own != other:
            raise InvalidContent(
                f"{contender.choice.variant.name} has {name} of shape {list(own)} where the "
                f"anchor, {anchor.choice.variant.name}, has {list(other)}: they cannot be compared",
                pointer=contender.choice.pointer,
            )


def _shape(job: TimedJob, output: str) -> tuple[int, ...]:
    """Of an output, every axis there."""
    letters = job.variant.outputs[output].letters
    return tuple(job.inputs.bound.sizes[letter] for letter in letters)


def _length(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]
