"""A validated request to time variants over lengths, and the crossovers of its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import pydantic

from qkv.attention.catalogue import Variant
from qkv.errors import InvalidContent, PayloadTooLarge, pointer_to
from qkv.jobs.fields import INTEGER, field_error
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import TimingJob
from qkv.jobs.measure.variant_choice import MAX_VARIANTS, VariantChoice
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire.message import Message

__all__ = ["Crossover", "SweepFields", "SweepRequest", "crossovers", "has_length"]

_AXES: Final = frozenset("BHGLSDE")  # the axes that a sweep has sizes for

_Length = Annotated[int, pydantic.Field(ge=1, le=1 << 20), INTEGER]


class SweepFields(pydantic.BaseModel):
    """The fields of a sweep request."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Annotated[
        list[Any],
        pydantic.Field(
            min_length=1, max_length=MAX_VARIANTS, description="What to time, in order."
        ),
    ]
    lengths: Annotated[
        list[_Length],
        pydantic.Field(
            min_length=1, max_length=64, description="Of queries and keys alike; none twice."
        ),
    ]
    batch: Annotated[int, pydantic.Field(ge=1, le=4096, description="Items."), INTEGER] = 1
    heads: Annotated[
        int, pydantic.Field(ge=1, le=4096, description="Of queries and keys alike."), INTEGER
    ] = 8
    width: Annotated[
        int,
        pydantic.Field(ge=1, le=65536, description="Of queries, keys and values alike."),
        INTEGER,
    ] = 64
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="Of all inputs."),
    ] = "float32"
    repeats: Annotated[
        int, pydantic.Field(ge=1, le=100, description="Runs of each cell that are timed."), INTEGER
    ] = 5
    seed: Annotated[
        int,
        pydantic.Field(ge=0, lt=1 << 63, description="What the inputs are drawn from."),
        INTEGER,
    ] = 0


class SweepRequest:
    """A validated request to time variants over lengths.

    Args:
        fields: the fields of `SweepFields`.
        limits: the limits of each run.

    Attributes:
        choices: the variants, in order.
        lengths: the lengths, in order.
        repeats: timed runs of each variant at each length.

    Raises:
        NotFound: a variant does not exist.
        InvalidContent: a field is wrong, or a variant has no length.
    """

    def __init__(self, fields: Mapping[str, Any], limits: Limits) -> None:
        try:
            parsed = SweepFields.model_validate(fields)
        except pydantic.ValidationError as error:
            raise field_error(error, list(SweepFields.model_fields)) from None
        for i, length in enumerate(parsed.lengths):
            if length in parsed.lengths[:i]:
                raise InvalidContent(f"{length} is there twice", pointer=pointer_to("lengths", i))
        self.choices = [
            VariantChoice.parse(value, "variants", i) for i, value in enumerate(parsed.variants)
        ]
        for choice in self.choices:
            _check_axes(choice)
        self.lengths, self.repeats = parsed.lengths, parsed.repeats
        self._fields, self._limits = parsed, limits

    def job(self, choice: VariantChoice, length: int) -> TimingJob:
        """Returns a run of a variant at a length, with zeros as inputs.

        Raises:
            PayloadTooLarge, InvalidContent: as `Job.from_message`.
        """
        shapes = self._shapes(choice.variant, length)
        size = sum(nbytes(self._fields.dtype, shape) for shape in shapes.values())
        if size > self._limits.job_bytes:  # before anything so large is allocated
            raise PayloadTooLarge(
                f"{choice.variant.name} would have {size} bytes of inputs; at most "
                f"{self._limits.job_bytes} may wait",
                limit=self._limits.job_bytes,
            )
        dtype = DTYPES[self._fields.dtype]
        blank = {n: RawTensor.from_numpy(np.zeros(s, dtype)) for n, s in shapes.items()}
        fields = {"parameters": choice.parameters, "outputs": ["output"]}
        return TimingJob.from_job(
            Job.from_message(choice.variant.name, Message(fields, blank), self._limits)
        )

    def with_random_inputs(self, job: TimingJob, length: int) -> TimingJob:
        """Returns the same job with random inputs, which are the same for every variant."""
        tensors = {n: self._random(n, t.shape, length) for n, t in job.inputs.tensors.items()}
        return job.with_tensors(tensors)

    def _random(self, name: str, shape: Sequence[int], length: int) -> RawTensor:
        generator = np.random.default_rng([self._fields.seed, length, *name.encode()])
        array = generator.standard_normal(shape, np.float32)
        return RawTensor.from_numpy(array.astype(DTYPES[self._fields.dtype], copy=False))

    def _shapes(self, variant: Variant, length: int) -> dict[str, tuple[int, ...]]:
        fields = self._fields
        sizes = dict.fromkeys("LS", length) | dict.fromkeys("HG", fields.heads)
        sizes |= {"B": fields.batch, "D": fields.width, "E": fields.width}
        return {
            spec.name: tuple(sizes[letter] for letter in spec.letters)
            for spec in variant.inputs.values()
            if not spec.is_optional
        }


class Crossover(NamedTuple):
    """A length from which on another curve is the lower one.

    Attributes:
        from_, to: the index of the lower curve before and after.
        length: the length.
    """

    from_: int
    to: int
    length: float


def crossovers(curves: Sequence[Mapping[int, float]]) -> list[Crossover]:
    """Where curves cross: on straight lines between points, both axes logarithmic.

    Args:
        curves: times, above zero, by length. Two are compared at the lengths that both have.

    Returns:
        In order of the curves, and then of length. Where two are equal at a length, they cross
        there if one is lower before and the other after.
    """
    found = []
    for j in range(len(curves)):
        for i in range(j):
            found += _crossings(i, j, curves[i], curves[j])
    return found


def _crossings(
    i: int, j: int, one: Mapping[int, float], other: Mapping[int, float]
) -> list[Crossover]:
    found: list[Crossover] = []
    before: tuple[float, float] | None = None  # the last point where they differ
    equal: float | None = None  # the first since then where they do not
    for length in sorted(one.keys() & other.keys()):
        at, above = math.log(length), math.log(one[length] / other[length])
        if above == 0:
            equal = at if equal is None else equal
            continue
        if before is not None and (before[1] > 0) != (above > 0):
            share = before[1] / (before[1] - above)
            crossing = before[0] + share * (at - before[0]) if equal is None else equal
            found.append(Crossover(*((i, j) if above > 0 else (j, i)), math.exp(crossing)))
        before, equal = (at, above), None
    return found


def has_length(variant: Variant) -> bool:
    """Returns True if random inputs of a length can be made for a variant."""
    axes = _axes(variant)
    return axes <= _AXES and "S" in axes


def _axes(variant: Variant) -> set[str]:
    """Returns the axes of the inputs that a variant needs."""
    needed = [spec for spec in variant.inputs.values() if not spec.is_optional]
    return {letter for spec in needed for letter in spec.letters}


def _check_axes(choice: VariantChoice) -> None:
    if not has_length(choice.variant):
        raise InvalidContent(
            f"{choice.variant.name} has inputs of axes {', '.join(sorted(_axes(choice.variant)))}: "
            f"a sweep draws what has a length S, and no axis but {', '.join(sorted(_AXES))}",
            pointer=choice.pointer,
        )
