"""Hypothesis strategy for calls of any variant, by its signature."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.sample_inputs import dtypes_of
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from support.head_terms import SINKS, SLOPES
from support.variant_bounds import BOUNDS
from support.variant_calls import with_padding

GARBAGE: Final = (0.0, 100.0, math.nan, math.inf, -math.inf)
LARGE: Final = ("efficient", "linear", "linear_layer", "mean", "taylor")
"""Variants that have no scores: their error does not grow with the size of queries and keys."""
STEEP: Final = ("efficient", "taylor")
"""Variants whose error does not grow with a rise of the keys along the sequence either."""

_SMALL = st.integers(1, 3)
_LENGTH = st.integers(1, 7) | st.sampled_from((16, 17, 33))
_LONG = st.integers(1, 150)  # the chunks of variants without scores are longer
_WIDTH = st.integers(1, 9) | st.sampled_from((16, 17, 33, 64))
_COUNT = st.none() | st.integers(0, 9) | st.just(2**31 - 1)
_OFFSETS = (0, 7, -3, 1000, -1000, -(2**31), 2**31 - 1)
_SEEDS = st.integers(0, 2**64 - 1)
_PARAMETERS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "causal": st.booleans(),
    "query_offset": st.just("end") | st.integers(-9, 9) | st.sampled_from(_OFFSETS),
    "normalize": st.booleans(),
    "scale": st.none() | st.just(0.0) | st.floats(-3, 3, allow_subnormal=False),
    "softcap": st.none() | st.floats(0.05, 100),
    "window": st.none() | st.tuples(_COUNT, _COUNT),
    "dropout": st.just(0.0) | st.floats(0.01, 0.99),
    "seed": _SEEDS,
    "normalize_qk": st.booleans(),
    "chunk": st.sampled_from((2, 3, 17, 64)),
    "bias": st.sampled_from((0.0, -4.5, 10.0, -80.0)),
}


@st.composite
def calls(draw: st.DrawFn, variant: Variant) -> dict[str, Any]:
    """Draws the arguments of `attend`: odd shapes, numbers of many sizes, masks, lengths."""
    is_large, is_steep = variant.name in LARGE, variant.name in STEEP
    length = _LENGTH | _LONG if is_large else _LENGTH
    sizes = {x: draw(_SMALL) for x in "BG"} | {x: draw(length) for x in "LS"}
    sizes |= {x: draw(_WIDTH) for x in "DE"} | {x: draw(st.integers(1, 9)) for x in "RO"}
    sizes |= {"H": sizes["G"] * draw(_SMALL), "I": draw(st.integers(1, 40))}
    sizes["N"] = sizes["S"] + draw(st.sampled_from((0, 0, 1, 30)))
    sizes |= {"V": sizes["G"] * draw(_SMALL)}
    sizes |= {
        "T": sizes["V"],
        "J": sizes["V"] * draw(_SMALL),
        "Z": draw(st.sampled_from((1, sizes["D"]))),
    }
    if "G" not in {x for i in variant.inputs.values() for x in i.letters}:
        sizes["H"] = draw(_SMALL)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    # a file without a bound may compute in the dtype of the request: ordinary numbers for it
    is_bounded = variant.name in BOUNDS
    dtype = draw(st.sampled_from(dtypes_of(variant)[: None if is_bounded else 2]))
    spreads = (0.0, 1e-3, 1.0, 4.0) if is_bounded else (1.0,)
    spread = draw(st.sampled_from(spreads + ((50.0,) if is_large else ())))
    slope = draw(st.sampled_from((0.0, 0.0, -1.0, 0.2, 3.0, 100.0))) if is_steep else 0.0
    tensors: dict[str, Tensor] = {}
    for spec in variant.inputs.values():
        if spec.is_optional and not draw(st.booleans()):
            continue
        tensors[spec.argument] = _tensor(draw, spec, sizes, dtype, generator)
        if spec.name in ("query", "key", "x"):
            tensors[spec.argument] *= spread
        if spec.name == "key":
            way = torch.randn(sizes["D"], generator=generator)
            rise = slope * torch.arange(sizes["S"])[:, None] * way
            tensors[spec.argument] += rise.clamp(-3e4, 3e4).to(dtype)
    parameters = draw(_parameters(variant, sizes))
    return with_padding(variant.name, tensors, draw(st.sampled_from(GARBAGE))) | parameters


def _tensor(
    draw: st.DrawFn,
    spec: Input,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    shape = [fixed_size(x) or sizes.get(x, 2) for x in spec.letters]
    if spec.broadcasts:
        return _mask(draw, shape, generator)
    if "float32" not in spec.dtypes:
        return torch.randint(0, sizes["S"] + 1, shape, generator=generator)
    if spec.letters == ("H",):
        numbers = draw(st.lists(SLOPES if "slopes" in spec.name else SINKS,
                                min_size=shape[0], max_size=shape[0]))  # fmt: skip
        kind = draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
        return torch.tensor(numbers, dtype=torch.float64).to(kind)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "R" in spec.letters:  # a projection has variance 1 / R
        tensor /= sizes["R"] ** 0.5
    return tensor.to(dtype)


def _mask(draw: st.DrawFn, sizes: list[int], generator: torch.Generator) -> Tensor:
    """Draws a boolean or floating mask, broadcast along any axes, that may hide whole rows."""
    shape = [size if draw(st.booleans()) else 1 for size in sizes]
    hidden = draw(st.sampled_from((0.0, 0.3, 0.9)))
    seen = torch.rand(shape, generator=generator) >= hidden
    seen &= torch.rand((*shape[:3], 1), generator=generator) >= hidden / 2
    kinds = (torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16)
    kind = draw(st.sampled_from(kinds))
    if kind == torch.bool:
        return seen
    added = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return added.to(kind).masked_fill(~seen, -math.inf)


def _parameters(variant: Variant, sizes: Mapping[str, int]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws a subset of the parameters; those that are not known here have their defaults."""
    optional = {n: s for n, s in _PARAMETERS.items() if n in variant.parameters.model_fields}
    for name, field in variant.parameters.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            optional[name] = st.sampled_from(typing.get_args(field.annotation))
    if "rank" in variant.parameters.model_fields:
        optional["rank"] = st.just(sizes["R"])
    return st.fixed_dictionaries({}, optional=optional)
