"""A validated request to time variants over lengths: its cells, and where two curves cross."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import pydantic

from qkv.attention.catalogue import Variant
from qkv.errors import InvalidContent, TooLarge, pointer_to
from qkv.jobs.fields import WHOLE, invalid_field
from qkv.jobs.job import Job, Limits
from qkv.jobs.measure.probe_jobs import TimedJob
from qkv.jobs.measure.variant_choice import MOST, Choice
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire.message import Message

__all__ = ["Crossover", "Sweep", "Sweeping", "crossovers", "has_length"]

_DRAWN: Final = frozenset("BHGLSDE")  # the axes that a sweep has sizes for

_Length = Annotated[int, pydantic.Field(ge=1, le=1 << 20), WHOLE]


class Sweeping(pydantic.BaseModel):
    """The fields of a sweep."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Annotated[
        list[Any],
        pydantic.Field(min_length=1, max_length=MOST, description="What to time, in order."),
    ]
    lengths: Annotated[
        list[_Length],
        pydantic.Field(
            min_length=1, max_length=64, description="Of queries and keys alike; none twice."
        ),
    ]
    batch: Annotated[int, pydantic.Field(ge=1, le=4096, description="Items."), WHOLE] = 1
    heads: Annotated[
        int, pydantic.Field(ge=1, le=4096, description="Of queries and keys alike."), WHOLE
    ] = 8
    width: Annotated[
        int, pydantic.Field(ge=1, le=65536, description="Of queries, keys and values alike."), WHOLE
    ] = 64
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"],
        pydantic.Field(description="Of all inputs."),
    ] = "float32"
    repeats: Annotated[
        int, pydantic.Field(ge=1, le=100, description="Runs of each cell that are timed."), WHOLE
    ] = 5
    seed: Annotated[
        int, pydantic.Field(ge=0, lt=1 << 63, description="What the inputs are drawn from."), WHOLE
    ] = 0


class Sweep:
    """What is to be run.

    Args:
        fields: those of `Sweeping`.
        limits: what each run may ask for.

    Attributes:
        choices: the variants, in order.
        lengths: in order.
        repeats: how often each is timed.

    Raises:
        NotFound: no such variant.
        InvalidContent: a field is wrong, or a variant has no length.
    """

    def __init__(self, fields: Mapping[str, Any], limits: Limits) -> None:
        try:
            asked = Sweeping.model_validate(fields)
        except pydantic.ValidationError as error:
            raise invalid_field(error, list(Sweeping.model_fields)) from None
        for i, length in enumerate(asked.lengths):
            if length in asked.lengths[:i]:
                raise InvalidContent(f"{length} is there twice", pointer=pointer_to("lengths", i))
        self.choices = [Choice.of(said, "variants", i) for i, said in enumerate(asked.variants)]
        for choice in self.choices:
            _check_axes(choice)
        self.lengths, self.repeats = asked.lengths, asked.repeats
        self._asked, self._limits = asked, limits

    def job(self, choice: Choice, length: int) -> TimedJob:
        """A run of a variant at a length; its numbers are still to be drawn.

        Raises:
            TooLarge, InvalidContent: as `Job.of`.
        """
        shapes = self._shapes(choice.variant, length)
        size = sum(nbytes(self._asked.dtype, shape) for shape in shapes.values())
        if size > self._limits.request:  # before anything so large is made
            raise TooLarge(
                f"{choice.variant.name} would have {size} bytes of inputs; at most "
                f"{self._limits.request} may wait",
                limit=self._limits.request,
            )
        dtype = DTYPES[self._asked.dtype]
        blank = {n: RawTensor.from_numpy(np.zeros(s, dtype)) for n, s in shapes.items()}
        fields = {"parameters": choice.parameters, "outputs": ["output"]}
        return TimedJob.like(Job.of(choice.variant.name, Message(fields, blank), self._limits))

    def drawn(self, job: TimedJob, length: int) -> TimedJob:
        """The same job with its numbers: those of an input are the same for every variant."""
        tensors = {n: self._draw(n, t.shape, length) for n, t in job.inputs.tensors.items()}
        return job.again(tensors)

    def _draw(self, name: str, shape: Sequence[int], length: int) -> RawTensor:
        numbers = np.random.default_rng([self._asked.seed, length, *name.encode()])
        array = numbers.standard_normal(shape, np.float32)
        return RawTensor.from_numpy(array.astype(DTYPES[self._asked.dtype], copy=False))

    def _shapes(self, variant: Variant, length: int) -> dict[str, tuple[int, ...]]:
        asked = self._asked
        sizes = dict.fromkeys("LS", length) | dict.fromkeys("HG", asked.heads)
        sizes |= {"B": asked.batch, "D": asked.width, "E": asked.width}
        return {
            spec.name: tuple(sizes[letter] for letter in spec.letters)
            for spec in variant.inputs.values()
            if not spec.optional
        }


class Crossover(NamedTuple):
    """Where one curve passes under another.

    Attributes:
        from_, to: which was lower before, and which is from there on.
        length: where.
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
    """Whether a variant's inputs can be drawn at a length."""
    axes = _axes(variant)
    return axes <= _DRAWN and "S" in axes


def _axes(variant: Variant) -> set[str]:
    """Of the inputs that it needs."""
    needed = [spec for spec in variant.inputs.values() if not spec.optional]
    return {letter for spec in needed for letter in spec.letters}


def _check_axes(choice: Choice) -> None:
    if not has_length(choice.variant):
        raise InvalidContent(
            f"{choice.variant.name} has inputs of axes {', '.join(sorted(_axes(choice.variant)))}: "
            f"a sweep draws what has a length S, and no axis but {', '.join(sorted(_DRAWN))}",
            pointer=choice.pointer,
        )
