"""A validated request to time variants over lengths, and the crossovers of the measured curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import pydantic

from qkv.attention.signature import STATE
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, PayloadTooLarge, pointer_to
from qkv.jobs.fields import INTEGER, field_error
from qkv.jobs.job import Job
from qkv.jobs.measure.sweep_curve import Curve, Mode, curves_of
from qkv.jobs.measure.variant_choice import MAX_VARIANTS, VariantChoice
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype

__all__ = ["Crossover", "SweepFields", "SweepRequest", "Times", "crossovers", "has_length"]

_NOTHING: Final = memoryview(b"")  # a plan depends on no numbers
_AXES: Final = frozenset("BHGJVLSDE")  # the axes that a sweep knows sizes for

_Length = Annotated[int, pydantic.Field(ge=1, le=1 << 20), INTEGER]


class SweepFields(pydantic.BaseModel):
    """The fields of a sweep request."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Annotated[
        list[Any],
        pydantic.Field(
            min_length=1, max_length=MAX_VARIANTS, description="The variants to time, in order."
        ),
    ]
    lengths: Annotated[
        list[_Length],
        pydantic.Field(
            min_length=1,
            max_length=64,
            description="The lengths of queries and keys, or of the tokens before the next one. "
            "Each length once.",
        ),
    ]
    mode: Annotated[
        Mode,
        pydantic.Field(
            description="whole: a call with all tokens. decode: the next token, of a variant with "
            "a state from its state, of another one from a cache of keys and values, and by "
            "computing all tokens again."
        ),
    ] = "whole"
    batch: Annotated[
        int, pydantic.Field(ge=1, le=4096, description="The number of batch items."), INTEGER
    ] = 1
    heads: Annotated[
        int,
        pydantic.Field(ge=1, le=4096, description="The number of query heads and of key heads."),
        INTEGER,
    ] = 8
    width: Annotated[
        int,
        pydantic.Field(ge=1, le=65536, description="The width of queries, keys and values."),
        INTEGER,
    ] = 64
    dtype: Annotated[
        FloatingDtype,
        pydantic.Field(description="The dtype of all inputs."),
    ] = "float32"
    repeats: Annotated[
        int, pydantic.Field(ge=1, le=100, description="The timed runs of each cell."), INTEGER
    ] = 5
    seed: Annotated[
        int,
        pydantic.Field(ge=0, lt=1 << 63, description="The seed of the random inputs."),
        INTEGER,
    ] = 0


class SweepRequest:
    """A validated request to time variants over lengths.

    Args:
        fields: of the request; those of JSON are validated.
        limits: the limits of each run.

    Attributes:
        curves: those of the variants, in order.
        lengths: the lengths, in order.
        repeats: timed runs of each variant at each length.

    Raises:
        NotFound: a variant does not exist.
        InvalidContent: a field is invalid, or a variant has no length axis.
    """

    def __init__(self, fields: Mapping[str, Any] | SweepFields, limits: Limits) -> None:
        try:
            parsed = SweepFields.model_validate(fields)
        except pydantic.ValidationError as error:
            raise field_error(error, list(SweepFields.model_fields)) from None
        for i, length in enumerate(parsed.lengths):
            if length in parsed.lengths[:i]:
                raise InvalidContent(
                    f"lengths names {length} twice", pointer=pointer_to("lengths", i)
                )
        choices = [
            VariantChoice.parse(value, "variants", i) for i, value in enumerate(parsed.variants)
        ]
        for choice in choices:
            _check_axes(choice)
        self.curves = [curve for choice in choices for curve in curves_of(choice, parsed.mode)]
        self.lengths, self.repeats = parsed.lengths, parsed.repeats
        self._fields, self._limits = parsed, limits

    def plan(self, curve: Curve, length: int) -> Plan:
        """Returns the timed run of a curve at a length.

        Raises:
            PayloadTooLarge, InvalidContent: an error of `Plan.from_message`.
        """
        if curve.way is None:
            return self._plan(curve, length, length, {})
        if curve.way == "recompute":
            return self._plan(curve, length + 1, length + 1, {})
        if curve.way == "cache":
            return self._plan(curve, 1, length + 1, {}).measured("token")
        specs = self.plan_before(curve, length).output_specs
        return self._plan(curve, 1, 1, {n: x for n, x in specs.items() if n.startswith(STATE)})

    def plan_before(self, curve: Curve, length: int) -> Plan:
        """Returns the run of the tokens before the next one, which returns their state."""
        return self._plan(curve, length, length, {})

    def _plan(
        self, curve: Curve, L: int, S: int, held: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> Plan:
        """Returns a run of these lengths; `held` are dtype and shape of a state's tensors."""
        name, dtype = curve.choice.variant.name, self._fields.dtype
        shapes = self._shapes(curve.choice.variant, L, S)
        specs: dict[str, tuple[str, tuple[int, ...]]] = {n: (dtype, s) for n, s in shapes.items()}
        specs |= held
        size = sum(nbytes(*spec) for spec in specs.values())
        if size > self._limits.job_bytes:  # checked before the allocation
            raise PayloadTooLarge(
                f"the inputs of {name} would be too large: got {size} bytes, "
                f"expected at most {self._limits.job_bytes}",
                limit=self._limits.job_bytes,
            )
        outputs = ["output", *(["state"] if curve.way == "state" else [])]
        fields = {"parameters": curve.parameters, "outputs": outputs}
        message = Message(fields, {n: RawTensor(*spec, _NOTHING) for n, spec in specs.items()})
        return Plan.from_message(name, message, self._limits).measured("time")

    def job(self, plan: Plan, length: int, held: Mapping[str, RawTensor] | None = None) -> Job:
        """Returns a run with random inputs beside the tensors of a state.

        Every variant gets the same numbers.
        """
        tensors = dict(held or {})
        for name, shape in plan.inputs.sent_shapes.items():
            if name not in tensors:
                tensors[name] = self._random(name, shape, length)
        return Job(plan, {name: tensors[name] for name in plan.inputs.sent_shapes})

    def _random(self, name: str, shape: Sequence[int], length: int) -> RawTensor:
        generator = np.random.default_rng([self._fields.seed, length, *name.encode()])
        array = generator.standard_normal(shape, np.float32)
        return RawTensor.from_numpy(array.astype(DTYPES[self._fields.dtype], copy=False))

    def _shapes(self, variant: Variant, L: int, S: int) -> dict[str, tuple[int, ...]]:
        fields = self._fields
        sizes = {"L": L, "S": S} | dict.fromkeys("HGJV", fields.heads)
        sizes |= {"B": fields.batch, "D": fields.width, "E": fields.width}
        return {
            spec.name: tuple(sizes[letter] for letter in spec.letters)
            for spec in variant.inputs.values()
            if not spec.is_optional
        }


class Times(NamedTuple):
    """The compute times of a cell over its repeats, in milliseconds, above zero."""

    least_ms: float
    median_ms: float
    most_ms: float


class Crossover(NamedTuple):
    """A pair of curves and the lengths between which the other one becomes the faster one.

    Attributes:
        from_, to: the index of the faster curve before and after.
        length: the length at which the medians cross.
        between: the two measured lengths.
    """

    from_: int
    to: int
    length: float
    between: tuple[int, int]


def crossovers(curves: Sequence[Mapping[int, Times]]) -> list[Crossover]:
    """Returns the crossovers of each pair of curves.

    A curve is faster at a length if its slowest repeat is below the fastest repeat of the other
    one. A crossover has a faster curve on both sides, and not the same one; medians that cross
    inside the range of the repeats are noise. Medians cross on straight lines between the measured
    lengths, with both axes logarithmic.

    Args:
        curves: times by length. Two curves are compared at the lengths that both have.

    Returns:
        Crossovers in order of the curves, and then of length.
    """
    crossings = []
    for j in range(len(curves)):
        for i in range(j):
            crossings += _crossovers_of_pair(i, j, curves[i], curves[j])
    return crossings


def _crossovers_of_pair(
    i: int, j: int, one: Mapping[int, Times], other: Mapping[int, Times]
) -> list[Crossover]:
    crossings: list[Crossover] = []
    lengths = sorted(one.keys() & other.keys())
    before: tuple[int, int] | None = None  # the last index with a faster curve, and that curve
    for place, length in enumerate(lengths):
        if one[length].most_ms < other[length].least_ms:
            faster, slower = i, j
        elif other[length].most_ms < one[length].least_ms:
            faster, slower = j, i
        else:
            continue
        if before is not None and before[1] == slower:
            section = lengths[before[0] : place + 1]
            crossing = _median_crossing({n: one[n].median_ms / other[n].median_ms for n in section})
            crossings.append(Crossover(slower, faster, crossing, (section[0], length)))
        before = place, faster
    return crossings


def _median_crossing(ratios: Mapping[int, float]) -> float:
    """Returns the first length at which a ratio of medians crosses 1.

    If two medians are equal at a length, they cross there if the ratio is on opposite sides of 1
    before and after it.

    Args:
        ratios: by length, in order; the first and the last are on opposite sides of 1.
    """
    last: tuple[float, float] | None = None  # logarithms of a length and of a ratio other than 1
    equal: float | None = None  # the first length since then with the ratio 1
    for length, ratio in ratios.items():
        at, above = math.log(length), math.log(ratio)
        if above == 0:
            equal = at if equal is None else equal
            continue
        if last is not None and (last[1] > 0) != (above > 0):
            share = last[1] / (last[1] - above)
            return math.exp(last[0] + share * (at - last[0]) if equal is None else equal)
        last, equal = (at, above), None
    raise AssertionError


def has_length(variant: Variant) -> bool:
    """Returns True if a sweep can draw inputs of a length for the variant."""
    axes = _axes(variant)
    return axes <= _AXES and "S" in axes


def _axes(variant: Variant) -> set[str]:
    """Returns the axes of the inputs that a variant needs."""
    needed = [spec for spec in variant.inputs.values() if not spec.is_optional]
    return {letter for spec in needed for letter in spec.letters}


def _check_axes(choice: VariantChoice) -> None:
    if not has_length(choice.variant):
        raise InvalidContent(
            f"a sweep cannot draw the inputs of {choice.variant.name}: got axes "
            f"{', '.join(sorted(_axes(choice.variant)))}, expected a length S and no others than "
            f"{', '.join(sorted(_AXES))}",
            pointer=choice.pointer,
        )
