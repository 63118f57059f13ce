"""Families of inputs on which the oracle calls a function.

`FAMILIES` has them by name; `draw` returns a call of one family. A family draws float64 numbers,
which are then rounded to the dtype: the inputs of a call are exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Generator, Tensor

from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.testing.call import STATE, Call
from qkv.testing.family import Family, NotDrawn, Tensors
from qkv.testing.recurrent_families import RECURRENT, draw_gates, draw_scale, draw_state
from qkv.testing.visibility import first_position, visible_keys

_BASE: Final = {"B": 2, "H": 4, "L": 32, "S": 32, "D": 16, "E": 16, "I": 16, "O": 8}

_MANY_PAIRS: Final = 1 << 17  # of a query and a key: from here on fewer items and heads are drawn


def draw(
    variant: Variant,
    family: str,
    dtype: torch.dtype,
    *,
    parameters: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Call:
    """Returns a call of a family; the same arguments return the same numbers.

    Args:
        variant: the variant to call.
        family: a key of `FAMILIES`.
        dtype: of the floating inputs.
        parameters: of the variant.
        sizes: by axis letter; the family chooses the others.
        seed: of the numbers.

    Raises:
        NotDrawn: the family does not apply to the variant, the parameters or the sizes.
        InvalidContent: a parameter is invalid.
    """
    chosen = FAMILIES[family]
    given = dict(parameters or {})
    known = choose_sizes(variant, chosen, sizes or {}, given, seed)
    generator = Generator().manual_seed(zlib.crc32(f"{seed} {variant.name} {family}".encode()))
    tensors = _draw_floats(variant, known, generator)
    if chosen.variant and chosen.variant != variant.name:
        raise NotDrawn(f"it is for {chosen.variant}")
    has = {*tensors, *known, *variant.required_names(variant.parse(given))}
    if missing := [n for n in chosen.needs if n not in has]:
        raise NotDrawn(f"{variant.name} has no {missing[0]}")
    if chosen.keyword not in ("", "scale", *variant.tensors):
        raise NotDrawn(f"{variant.name} has no input {chosen.keyword}")
    if chosen.change is not None:
        chosen.change(tensors, generator, dtype)
    draw_gates(variant, chosen, tensors, known, given, generator)
    limits = torch.finfo(dtype)
    inputs = {
        n: x.to(dtype) if n == "log_decay" else x.clamp(limits.min, limits.max).to(dtype)
        for n, x in tensors.items()
    }
    if chosen.keyword == STATE:
        inputs[STATE] = draw_state(variant, known, dtype, generator)
    if chosen.keyword == "scale":
        given.setdefault("scale", draw_scale(known, generator))
    call = _restrict(Call(variant, inputs, given, dtype), family, generator)
    if not chosen.is_strict and _has_blind_rows(call):
        raise NotDrawn("rows that see no key run only with strict=True")
    shape = [fixed_size(x) or known[x] for x in variant.outputs["output"].letters]
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    ordered = {n: call.inputs[n] for n in variant.tensors if n in call.inputs}
    if family == "strided":
        ordered = {n: _strided(x) for n, x in ordered.items()}
    return Call(variant, ordered, call.parameters, dtype, gradient)


def choose_sizes(
    variant: Variant,
    family: Family,
    given: Mapping[str, int],
    parameters: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, int]:
    """Returns the size of each axis letter of the variant's inputs; draws nothing.

    Args:
        variant: the variant to call.
        family: a value of `FAMILIES`.
        given: sizes by axis letter.
        parameters: of the variant; `rank` is R.
        seed: of the numbers: some families draw their length.

    Raises:
        NotDrawn: the sizes do not fit the family.
        InvalidContent: a parameter is invalid.
    """
    usual = {**_BASE, **family.sizes}
    parsed = variant.parse(parameters)
    if variant.name == "gated":  # whose budget takes the response of each token to all before
        usual["S"] = min(usual["S"], 256)
    if family.tokens is not None:
        usual["S"] = family.tokens(getattr(parsed, "chunk", 64), seed)
    known = {**usual, **given}
    if ("L" in given) != ("S" in given):  # the family's difference stays
        one, other = ("L", "S") if "L" in given else ("S", "L")
        if usual[other] > 1:  # one query stays one
            known[other] = max(1, known[one] + usual[other] - usual[one])
    if known["L"] * known["S"] > _MANY_PAIRS:
        # items of a family with a keyword have their own masks or lengths
        known |= {"B": 2 if family.keyword else 1, "H": 2 * family.group, **given}
    letters = {x for i in variant.inputs.values() for x in i.letters if not fixed_size(x)}
    if "G" in letters:
        group = family.group
        if "G" not in given and group == 1 and "G" in family.sizes:
            known["G"] = family.sizes["G"]
        known["G"] = given.get("G", known["H"] // group)
        if known["G"] < 1 or known["H"] % known["G"]:
            raise NotDrawn(f"{known['H']} query heads do not fit {known['G']} key heads")
        if group > 1 and known["G"] in (1, known["H"]) and "H" in given:
            raise NotDrawn("the sizes leave no groups of heads")
    if "E" in letters and "E" not in given and "E" not in family.sizes and "D" in letters:
        known["E"] = known["D"]
    if {"L", "S"} <= set(family.needs) and known["L"] == known["S"]:
        raise NotDrawn("the sizes make L and S equal")
    # of a recurrence, the heads of values are at least those of queries and keys
    known |= {"J": known.get("G", known["H"]), "V": known["H"], "T": known["H"]}
    if known.setdefault("Z", 1) > 1:
        known["D"] = given.get("D", known["Z"])
        if known["D"] != known["Z"]:
            raise NotDrawn("Z is neither 1 nor D")
    rank = getattr(parsed, "rank", None)
    known |= {"R": rank or max(1, known["S"] // 4), "N": known["S"]}
    letters |= {*variant.outputs["output"].letters}
    return {x: known[x] for x in letters if x in known}


def _draw_floats(variant: Variant, sizes: Mapping[str, int], generator: Generator) -> Tensors:
    """Draws the required inputs, and those that the variant itself would draw at random."""
    random = variant.random_input_names
    tensors = {}
    for spec in variant.inputs.values():
        if (spec.is_optional and spec.name not in random) or "float32" not in spec.dtypes:
            continue
        shape = [fixed_size(x) or sizes[x] for x in spec.letters]
        tensors[spec.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        if spec.name in random:
            tensors[spec.name] *= shape[0] ** -0.5
    return tensors


def _restrict(call: Call, family: str, generator: Generator) -> Call:
    """Returns the call with the mask or the lengths of its family."""
    inputs = dict(call.inputs)
    if family in ("mask", "blind mask", "nan behind mask"):
        B, _, L, S = call.score_shape
        mask = torch.rand(B, 1, L, S, generator=generator) < 0.6
        rows = torch.arange(L).view(1, 1, L, 1)
        position = (first_position(call) + rows).clamp(0, S - 1).expand(B, 1, L, 1)
        mask.scatter_(-1, position, torch.ones_like(mask))
        if family == "blind mask":
            mask[:, :, [0, L // 2]] = False
        inputs["mask"] = mask
        if family == "nan behind mask":
            mask[-1, :, :, -1] = False
            for name in ("key", "value"):
                inputs[name] = inputs[name].clone()
                inputs[name][-1, :, -1] = torch.nan
    elif family in ("padding", "blind padding", "nan in padding"):
        name = "key" if "key" in inputs else "value"
        B, S = len(inputs[name]), inputs[name].shape[2]
        lengths = torch.arange(B).mul(S // 2 + 1).remainder(S).neg() + S
        if family == "blind padding":
            lengths[0] = 0
        inputs["key_lengths"] = lengths
        if family == "nan in padding":
            padded = (torch.arange(S) >= lengths.view(-1, 1)).view(B, 1, S, 1)
            for name in {"key", "value"} & inputs.keys():
                inputs[name] = inputs[name].masked_fill(padded, torch.nan)
    elif family == "sinks":
        H = inputs["query"].shape[1]
        sinks = 2 * torch.randn(H, generator=generator, dtype=torch.float64)
        inputs["sinks"] = sinks.to(call.dtype)
    return Call(call.variant, inputs, call.parameters, call.dtype)


def _has_blind_rows(call: Call) -> bool:
    """True if a row sees no key."""
    if not {"query", "key"} <= call.inputs.keys():
        return False
    return not bool(visible_keys(call).any(-1).all())


def _strided(x: Tensor) -> Tensor:
    """Returns the same numbers, with the second and third axis exchanged in memory."""
    if x.ndim == 4 and x.is_floating_point():
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


def _one_hot(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Points each query at one key, whose score is about 30 greater than all others."""
    key, query = tensors["key"], tensors["query"]
    (_, H, L, D), (_, G, S, _) = query.shape, key.shape
    keys = key.repeat_interleave(H // G, 1)
    chosen = torch.randint(0, S, (L,), generator=generator)
    aimed = keys[:, :, chosen]
    query.copy_(aimed / aimed.norm(dim=-1, keepdim=True) * 30 * D**0.5)
    key /= key.norm(dim=-1, keepdim=True)


def _steep(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes scores of tens: a few keys have nearly all of the weight."""
    tensors["query"] *= 10


def _low(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes all scores of the first rows about -2.45e5, with D = 16 and the usual scale.

    Raises:
        NotDrawn: the dtype is narrow: its scores may overflow, or lose all digits.
    """
    if dtype.itemsize < 4:
        raise NotDrawn("scores in a narrow dtype have no digits there")
    query = tensors["query"]
    query[:, :, : (query.shape[2] + 1) // 2, 0] = 990
    tensors["key"][..., 0] = -990


def _large(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes scores of hundreds, whose exponential float32 cannot hold, and large values."""
    for name, x in tensors.items():
        x *= 64 if name in ("value", "x", "weight") else 8


def _tiny(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes numbers whose products are smaller than the smallest normal number of the dtype."""
    least = torch.finfo(dtype).smallest_normal
    for x in tensors.values():
        x *= 8 * least if dtype == torch.float16 else least**0.5


def _near_cancelling(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes pairs of equal keys with opposite values, and queries opposed to keys."""
    value = tensors["value"]
    pairs = torch.arange(value.shape[2]) // 2 * 2
    noise = value * 2.0**-6
    value.copy_(value[:, :, pairs])
    value[:, :, 1::2] *= -1
    value += noise
    if "key" in tensors and "query" in tensors:
        tensors["key"].copy_(tensors["key"][:, :, pairs])
        D = tensors["query"].shape[-1]
        tensors["query"][..., D // 2 :] = -tensors["query"][..., : D - D // 2]
        tensors["key"][..., D // 2 :] = tensors["key"][..., : D - D // 2] * (1 - 2.0**-6)


def _constant_rows(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes each row one positive number, so that rounding errors of a sum add up."""
    for x in tensors.values():
        rows = torch.rand((*x.shape[:-1], 1), generator=generator, dtype=torch.float64)
        x.copy_((0.5 + rows).expand_as(x))


def _long_sum(tensors: Tensors, generator: Generator, dtype: torch.dtype) -> None:
    """Makes many equal weights and positive values: in a narrow dtype, their sum stops to grow.

    All keys have the same value, so that each step of a sum rounds in the same direction.
    """
    numbers = tensors["value"][..., :1, :].sigmoid() + 0.5
    _constant_rows(tensors, generator, dtype)
    tensors["value"].copy_(numbers.expand_as(tensors["value"]))
    if "key" in tensors:
        tensors["key"].copy_(tensors["key"][:, :, :1].expand_as(tensors["key"]))


FAMILIES: Final[Mapping[str, Family]] = {
    "normal": Family("normally distributed"),
    "one-hot": Family("each query picks one key", _one_hot, needs=("query", "key")),
    "steep": Family("scores of tens", _steep, needs=("query", "key")),
    "large": Family("scores of hundreds", _large),
    "low": Family(
        "scores of -245,000 in a whole row", _low, needs=("query", "key"), variant="softmax"
    ),
    "tiny": Family("products below the smallest normal number", _tiny),
    "near-cancelling": Family("values that nearly cancel", _near_cancelling, needs=("value",)),
    "constant rows": Family(
        "each row is one number", _constant_rows,
        {"B": 1, "H": 2, "L": 16, "S": 24, "D": 64, "E": 64},
    ),
    "long sum": Family(
        "many equal weights", _long_sum, {"B": 1, "H": 2, "L": 3, "S": 1024, "D": 32, "E": 32},
        needs=("value",),
    ),
    "several blocks": Family(
        "more keys than a block has", sizes={"B": 1, "H": 2, "L": 160, "S": 160},
        needs=("query", "key"),
    ),
    "odd sizes": Family(
        "odd sizes", sizes={"B": 3, "H": 3, "L": 17, "S": 17, "D": 7, "E": 7, "I": 17, "O": 5}
    ),
    "one query": Family("one query", sizes={"L": 1, "S": 19}, needs=("L", "S")),
    "more keys": Family("L < S", sizes={"L": 12, "S": 29}, needs=("L", "S")),
    "more queries": Family("L > S", sizes={"L": 29, "S": 12}, needs=("L", "S")),
    "grouped heads": Family(
        "two query heads, or of gated two value heads, read one key head", group=2, needs=("G",)
    ),
    "mask": Family("a boolean mask", keyword="mask"),
    "padding": Family("key_lengths", sizes={"L": 16}, keyword="key_lengths"),
    "sinks": Family("a sink for each query head", keyword="sinks"),
    "strided": Family("not contiguous"),
    **RECURRENT,
    "value width": Family("E is not D", sizes={"E": 9}, needs=("E", "D"), is_strict=True),
    "blind mask": Family("rows whose mask hides all keys", keyword="mask", is_strict=True),
    "blind padding": Family("an item without keys", keyword="key_lengths", is_strict=True),
    "nan behind mask": Family("NaN in a hidden key", keyword="mask", is_strict=True),
    "nan in padding": Family("NaN in padding", keyword="key_lengths", is_strict=True),
}  # fmt: skip
"""The families by name, in the order in which they run."""


def families_of(variant: str) -> list[str]:
    """Returns the names of the families that are for a variant, or for any, in their order."""
    return [name for name, family in FAMILIES.items() if family.variant in ("", variant)]
