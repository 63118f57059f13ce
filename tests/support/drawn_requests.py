"""Valid requests to any variant, drawn from its signature: by Hypothesis, or by a seed."""

from __future__ import annotations

import math
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.attention.sample_inputs import dtypes_of
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from support.variant_bounds import BOUNDS, bounds_of
from support.variant_calls import with_padding

T = TypeVar("T")

GATES: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": (), "gated": ("log_decay",), "delta": ("beta",), "gated_delta": ("log_decay", "beta"),
}  # fmt: skip
"""The inputs that each rule of `gated` needs; it takes no other of them."""
LARGE: Final = ("efficient", "linear", "linear_layer", "mean", "taylor")
"""Variants that have no scores: their error does not grow with the size of queries and keys."""
STEEP: Final = ("efficient", "taylor")
"""Variants whose error does not grow with a rise of the keys along the sequence either."""

_GATES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "log_decay": lambda x: -x.abs(), "beta": torch.sigmoid,
}  # fmt: skip
_FLOATING: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_GARBAGE: Final = (0.0, 100.0, math.nan, math.inf, -math.inf)
_OFFSETS: Final = (0, 7, -3, 1000, -1000, -(2**31), 2**31 - 1)
_ODD_LENGTHS: Final = (8, 16, 17, 33)
_WIDTHS: Final[Sequence[int]] = (*range(1, 10), 16, 17, 33, 64)
_SLOPES: Final = (0.0, 0.5, 2.0**-8, 300.0, -1e4)
_SINKS: Final = (0.0, -300.0, 300.0, -1e4, 1e4)


class Source(Protocol):
    """Choices, by Hypothesis or by a seed."""

    def choice(self, options: Sequence[T]) -> T:
        """Returns one of the options."""

    def integer(self, least: int, most: int) -> int:
        """Returns an integer of this range, both ends included."""

    def number(self, least: float, most: float) -> float:
        """Returns a number of this range."""


@cache
def _sampled(options: tuple[T, ...], _: tuple[type, ...]) -> st.SearchStrategy[T]:
    """Returns a strategy for options and their types: 0 is equal to False. It is looked at once."""
    return st.sampled_from(options)


class _Hypothesis:
    """Choices that Hypothesis makes, and shrinks."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def choice(self, options: Sequence[T]) -> T:
        strategy: st.SearchStrategy[T] = _sampled(tuple(options), tuple(map(type, options)))
        return self._draw(strategy)

    def integer(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def number(self, least: float, most: float) -> float:
        return self._draw(st.floats(least, most, allow_subnormal=False))


class _Seeded(Random):
    """Choices that follow from a seed."""

    integer = Random.randint
    number = Random.uniform


class Mask(NamedTuple):
    """A mask: its dtype, the axes of size 1, and the share of hidden keys."""

    dtype: torch.dtype
    shared: tuple[bool, ...]
    hidden: float


@dataclass(frozen=True)
class Request:
    """A valid request that Hypothesis can shrink and print; `tensors` draws its numbers.

    Attributes:
        variant: its name.
        dtype: of the floating inputs that the variant needs.
        sizes: by letter.
        optional: the optional inputs that it has, with a `Mask`, the numbers of terms of heads, or
            True for gates of any size and sign.
        parameters: those that differ from their defaults.
        spread: factor of queries and keys.
        slope: rise of the keys along the sequence.
        garbage: the number in keys and values behind `key_lengths`.
        seed: of the tensors without axis B, which requests with equal batch keys share.
        item_seed: of the others.
    """

    variant: str
    dtype: torch.dtype
    sizes: Mapping[str, int]
    optional: Mapping[str, Any]
    parameters: Mapping[str, Any]
    spread: float
    slope: float
    garbage: float
    seed: int
    item_seed: int

    @property
    def _inputs(self) -> Mapping[str, Input]:
        return variants()[self.variant].inputs

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by argument; padding keys and values hold garbage."""
        given = {
            spec.argument: self._tensor(spec)
            for spec in self._inputs.values()
            if not spec.is_optional or spec.name in self.optional
        }
        return with_padding(self.variant, given, self.garbage)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `attend`."""
        return {**self.tensors(), **self.parameters}

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by the names of a request."""
        found, inputs = self.tensors(), self._inputs.values()
        return {spec.name: found[spec.argument] for spec in inputs if spec.argument in found}

    def bounds(self, truth: Any) -> dict[str, Tensor]:
        """Returns the largest error of each output, for the truth of these numbers."""
        clean = with_padding(self.variant, self.tensors(), 0.0)
        return bounds_of(self.variant, clean, self.parameters, truth)

    def _tensor(self, spec: Input) -> Tensor:
        seed = self.item_seed if "B" in spec.letters else self.seed
        generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
        shape = self._shape(spec)
        how: Any = self.optional.get(spec.name)
        if isinstance(how, Mask):
            return _mask(how, shape, generator)
        if "float32" not in spec.dtypes:
            return torch.randint(0, self.sizes["S"] + 1, shape, generator=generator)
        if spec.letters == ("H",):
            numbers, dtype = how
            return torch.tensor(numbers, dtype=torch.float64).to(dtype)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self._scaled(spec, normal, generator).to(self.dtype)

    def _shape(self, spec: Input) -> list[int]:
        return [fixed_size(x) or self.sizes.get(x, 2) for x in spec.letters]

    def _scaled(self, spec: Input, normal: Tensor, generator: torch.Generator) -> Tensor:
        if spec.name in _GATES:
            is_free = self.optional[spec.name]
            return normal if is_free else _GATES[spec.name](normal)
        if "R" in spec.letters:  # a projection has variance 1 / R
            return normal / math.sqrt(self.sizes["R"])
        if spec.name not in ("query", "key", "x"):
            return normal
        tensor: Tensor = normal.to(self.dtype) * self.spread
        if spec.name == "key" and self.slope:
            way = torch.randn(self.sizes["D"], generator=generator)
            rise: Tensor = self.slope * torch.arange(self.sizes["S"])[:, None] * way
            tensor = tensor + rise.clamp(-3e4, 3e4).to(self.dtype)
        return tensor


def _mask(how: Mask, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    shape = [1 if shared else size for size, shared in zip(sizes, how.shared, strict=True)]
    seen = torch.rand(shape, generator=generator) >= how.hidden
    seen &= torch.rand((*shape[:3], 1), generator=generator) >= how.hidden / 2  # whole rows
    if how.dtype == torch.bool:
        return seen
    added = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return added.to(how.dtype).masked_fill(~seen, -math.inf)


@st.composite
def requests(draw: st.DrawFn, variant: Variant) -> Request:
    """Draws requests of odd shapes, with numbers of many sizes, masks and lengths."""
    return _request(_Hypothesis(draw), variant, {}, is_tame=False)


def sample(
    variant: Variant, seed: int, sizes: Mapping[str, int] | None = None, *, is_tame: bool = False
) -> Request:
    """Returns the request of a seed.

    Args:
        variant: of the request.
        seed: the same seed gives the same request.
        sizes: by letter; others are drawn.
        is_tame: True for ordinary numbers, of which every kernel gives the same within rounding.
    """
    return _request(_Seeded(seed), variant, sizes or {}, is_tame)


def _request(source: Source, variant: Variant, fixed: Mapping[str, int], is_tame: bool) -> Request:
    sizes = _sizes(source, variant, fixed)
    # a file without a bound may compute in the dtype of the request: ordinary numbers for it
    is_bounded = variant.name in BOUNDS
    spreads = [0.0, 1e-3, 1.0, 4.0] if is_bounded else [1.0]
    spreads += [50.0] if variant.name in LARGE else []
    is_steep = variant.name in STEEP and not is_tame
    parameters = _parameters(source, variant, sizes)
    gates = GATES[parameters.get("rule", "linear")]
    if is_tame and "beta" in gates:
        parameters["normalize_qk"] = True  # the delta rules grow with large keys
    return Request(
        variant=variant.name,
        dtype=source.choice(dtypes_of(variant)[: None if is_bounded else 2]),
        sizes=sizes,
        optional=_optional(source, variant, sizes, gates, is_tame),
        parameters=parameters,
        spread=source.choice([0.1, 1.0, 5.0] if is_tame else spreads),
        slope=source.choice((0.0, 0.0, -1.0, 0.2, 3.0, 100.0)) if is_steep else 0.0,
        garbage=source.choice(_GARBAGE),
        seed=source.integer(0, 2**32 - 1),
        item_seed=source.integer(0, 2**32 - 1),
    )


def _sizes(source: Source, variant: Variant, fixed: Mapping[str, int]) -> dict[str, int]:
    """Draws the size of each letter that is not fixed."""

    def small() -> int:
        return source.integer(1, 3)

    def length() -> int:
        kind = source.choice(("short", "short", "odd") + ("long",) * (variant.name in LARGE))
        if kind == "odd":
            return source.choice(_ODD_LENGTHS)
        # the chunks of variants without scores are longer
        return source.integer(1, 150 if kind == "long" else 7)

    def width() -> int:
        return source.choice(_WIDTHS)

    def per(letter: str) -> int:
        return sizes.get(letter, 1) * small()

    letters = {x for i in variant.inputs.values() for x in i.letters}
    draws: dict[str, Callable[[], int]] = {
        "B": small, "G": small, "H": lambda: per("G"), "V": lambda: per("G"),
        "J": lambda: per("V"), "L": length, "S": length, "D": width, "E": width,
        "R": lambda: source.integer(1, 9), "O": lambda: source.integer(1, 9),
        "I": lambda: source.integer(1, 40), "Z": lambda: source.choice((1, sizes["D"])),
        "N": lambda: sizes["S"] + source.choice((0, 0, 1, 30)),
    }  # fmt: skip
    sizes = dict(fixed)
    for letter, drawn in draws.items():
        if letter in letters and letter not in fixed:
            sizes[letter] = drawn()
    if "T" in letters:  # the heads of the state, and of the output
        sizes |= {"T": sizes["V"], "H": sizes["J"]}
    return sizes


def _optional(
    source: Source,
    variant: Variant,
    sizes: Mapping[str, int],
    gates: Sequence[str],
    is_tame: bool,
) -> dict[str, Any]:
    """Draws some of the optional inputs; of gates, those that the rule needs."""
    found = {gate: not is_tame and _is_true(source) for gate in gates}
    for spec in variant.inputs.values():
        if spec.is_optional and spec.name not in _GATES and _is_true(source):
            found[spec.name] = _kind(source, spec, sizes)
    return found


def _kind(source: Source, spec: Input, sizes: Mapping[str, int]) -> Any:
    """Returns what else an optional input needs than a seed."""
    if spec.broadcasts:
        dtype = source.choice((torch.bool, *_FLOATING))
        shared = tuple(_is_true(source) for _ in spec.letters)
        return Mask(dtype, shared, source.choice((0.0, 0.3, 0.9)))
    if spec.letters != ("H",):
        return None
    usual, most = (_SLOPES, 4.0) if "slopes" in spec.name else (_SINKS, 20.0)
    numbers = [
        source.number(-most, most) if _is_true(source) else source.choice(usual)
        for _ in range(sizes["H"])
    ]
    return numbers, source.choice(_FLOATING)


def _is_true(source: Source) -> bool:
    return source.choice((False, True))


def _count(source: Source) -> int | None:
    return source.choice((None, 2**31 - 1, source.integer(0, 9)))


_DRAWN: Final[Mapping[str, Callable[[Source], Any]]] = {
    "causal": _is_true,
    "query_offset": lambda s: s.choice(("end", s.integer(-9, 9), s.choice(_OFFSETS))),
    "normalize": _is_true,
    "scale": lambda s: s.choice((None, 0.0, s.number(-3, 3))),
    "softcap": lambda s: s.choice((None, s.number(0.05, 100))),
    "window": lambda s: s.choice((None, (_count(s), _count(s)))),
    "dropout": lambda s: s.choice((0.0, s.number(0.01, 0.99))),
    "seed": lambda s: s.integer(0, 2**64 - 1),
    "normalize_qk": _is_true,
    "chunk": lambda s: s.choice((2, 3, 17, 64)),
    "bias": lambda s: s.choice((0.0, -4.5, 10.0, -80.0)),
}


def _parameters(source: Source, variant: Variant, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Draws some of the parameters; those that are not known here have their defaults."""
    found: dict[str, Any] = {}
    for name, field in variant.parameters.model_fields.items():
        literals = typing.get_args(field.annotation)
        is_literal = typing.get_origin(field.annotation) is typing.Literal
        if not (is_literal or name in _DRAWN or name == "rank") or not _is_true(source):
            continue
        if is_literal:
            found[name] = source.choice(literals)
        else:
            found[name] = sizes["R"] if name == "rank" else _DRAWN[name](source)
    return found
