"""A validated request to time variants over lengths: its curves, their plans and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import pydantic

from qkv.attention.signature import STATE
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, PayloadTooLarge, pointer_to
from qkv.jobs.fields import INTEGER, field_error
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.variant_choice import MAX_VARIANTS, VariantChoice
from qkv.tensors import DTYPES, RawTensor, nbytes
from qkv.wire.message import Message
from qkv.wire.tensor_types import FloatingDtype

_NOTHING: Final = memoryview(b"")  # a plan depends on no numbers
_AXES: Final = frozenset("BHGJVLSDE")  # the axes that a sweep knows sizes for

_CACHED: Final = frozenset({"query", "key", "value"})

Mode = Literal["whole", "decode"]
Way = Literal["state", "cache", "recompute"]

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
            json_schema_extra={"uniqueItems": True},
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


class Curve(NamedTuple):
    """A variant, and how it computes the next token.

    Attributes:
        way: state: from the state behind the tokens before. cache: from their keys and values.
            recompute: from all tokens. None: the sweep times whole calls.
    """

    choice: VariantChoice
    way: Way | None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a run: those of the choice, and those that the way needs."""
        own = self.choice.parameters
        if self.way == "cache":  # the only query is behind all keys
            return {**own, "causal": False, "query_offset": "end"}
        needed = self.choice.variant.state_needs if self.way == "state" else {"causal": True}
        return own if self.way is None else {**own, **needed}


def _curves_of(choice: VariantChoice, mode: Mode) -> list[Curve]:
    """Returns the curves of a variant: for decoding its state, or both ways without one.

    Raises:
        InvalidContent: the variant cannot compute a token from those before it.
    """
    if mode == "whole":
        return [Curve(choice, None)]
    if choice.variant.state is not None:
        return [Curve(choice, "state")]
    if not _can_decode(choice.variant):
        raise InvalidContent(
            f"{choice.variant.name} cannot decode: got no state and no parameter causal, expected "
            "a variant that computes a token from those before it",
            pointer=choice.pointer,
        )
    return [Curve(choice, "recompute"), Curve(choice, "cache")]


def _can_decode(variant: Variant) -> bool:
    """Returns True if a variant without a state computes a token from keys and values."""
    known = variant.parameters.model_fields
    return variant.inputs.keys() >= _CACHED and {"causal", "query_offset"} <= known.keys()


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
        self.curves = [curve for choice in choices for curve in _curves_of(choice, parsed.mode)]
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
            return self._plan(curve, 1, length + 1, {})
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
        return Plan.from_message(name, message, self._limits).measured()

    def draw(
        self, plan: Plan, length: int, held: Mapping[str, RawTensor] | None = None
    ) -> dict[str, RawTensor]:
        """Returns random inputs of a plan, beside the tensors of a state.

        Every variant gets the same numbers.
        """
        held = held or {}
        return {
            name: held[name] if name in held else self._random(name, shape, length)
            for name, shape in plan.inputs.sent_shapes.items()
        }

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
