"""Limits of cases, which are checked by their sizes before anything is drawn.

`check_memory` has those of a case file, and `check_cost` those of /v1/verify. There, a wrong output
costs the most: the diagnosis runs up to 250 wrong variants in float64. At the limits it takes up to
1.5 s of one core for `softmax`, and up to 4 s for `taylor` with 64 heads. A right output takes at
most 0.3 s, usually 0.01 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from qkv.attention.catalogue import find
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, PayloadTooLarge
from qkv.testing.case_spec import CaseSpec
from qkv.testing.families import FAMILIES

MAX_HEADS: Final = 64
"""Most heads of all items, B H: matrix products have a cost for each."""
MAX_WIDTH: Final = 256
"""Most channels, D or E: the budget takes the columns of the values one by one."""
MAX_SCORES: Final = 1 << 16
"""Most scores, B H L S."""
MAX_PRODUCTS: Final = 1 << 22
"""Most scores times the larger width, B H L S max(D, E)."""
MAX_NUMBERS: Final = 1 << 18
"""Most numbers of the inputs and the output."""
_MAX_RESULTS: Final = 1 << 26  # of scores or of the output: each takes about 80 bytes to judge
_MAX_INPUT: Final = 1 << 30  # numbers of an input: 8 GiB, since they are drawn in float64


def check_memory(variant: Variant, sizes: Mapping[str, int], pointer: str) -> None:
    """Checks that a call with these sizes can be drawn and judged in memory.

    Raises:
        InvalidContent: it is too large.
    """
    drawn = [i for i in variant.inputs.values() if not i.is_optional]
    # the budget of a recurrence has a response of each token to each one before
    scores = "BHSS" if variant.name == "gated" else "BHLS"
    results = max(_count(scores, sizes), _count(variant.outputs["output"].letters, sizes))
    largest = max(_count(i.letters, sizes) for i in drawn)
    excess = _first_excess(
        (results, " scores or numbers of the output", _MAX_RESULTS),
        (largest, " numbers of an input", _MAX_INPUT),
    )
    if excess is not None:
        raise InvalidContent(excess[0], pointer=pointer)


def check_cost(spec: CaseSpec) -> None:
    """Checks that a case can be drawn and judged in little time.

    `linear_layer` has O rows of I scores. `mean` has no queries: its S running averages count as
    S / 32 queries. Keys and mixtures of keys need one matrix product: they count as 1/64. A
    recurrence runs token by token: its S tokens count as S / 4 queries, and each has a state.

    Raises:
        InvalidContent: the family does not fit.
        PayloadTooLarge: a size is too large.
    """
    sizes = spec.choose_sizes()
    columns = sizes.get("S", sizes.get("I", 1))
    share = 64 if "D" in sizes or "I" in sizes else 32
    share = 4 if "Z" in sizes else share
    products = -(-sizes.get("R", columns) // share)
    rows = max(sizes.get("L", sizes.get("O", 1)), products)
    width = max(sizes.get("D", 1), sizes.get("E", 1))
    heads = sizes.get("B", 1) * sizes.get("H", sizes.get("J", 1))
    scores = heads * rows * columns
    states = heads * columns * sizes["D"] * sizes["E"] if "Z" in sizes else 0
    excess = _first_excess(
        (heads, " for B H", MAX_HEADS),
        (width, " for the largest of D and E", MAX_WIDTH),
        (scores, " for B H L S", MAX_SCORES),
        (scores * width, " for B H L S max(D, E)", MAX_PRODUCTS),
        (states, " for B H S D E", MAX_PRODUCTS),
        (_number_count(spec, sizes), " for numbers", MAX_NUMBERS),
    )
    if excess is not None:
        raise PayloadTooLarge(excess[0], pointer="/sizes", limit=excess[1])


def _first_excess(*counts: tuple[int, str, int]) -> tuple[str, int] | None:
    """Returns a message and the limit of the first count above its limit; None if all fit."""
    for count, text, limit in counts:
        if count > limit:
            return f"the case is too large: got {count}{text}, expected at most {limit}", limit
    return None


def _number_count(spec: CaseSpec, sizes: Mapping[str, int]) -> int:
    """Returns the count of numbers in the inputs that the family draws, and in the output."""
    variant, keyword = find(spec.variant), FAMILIES[spec.family].keyword
    drawn = {*variant.required_names(variant.parse(spec.parameters))}
    drawn |= {*variant.random_input_names, keyword} & variant.tensors.keys()
    shapes = [variant.tensors[n].letters for n in drawn] + [variant.outputs["output"].letters]
    return sum(_count(letters, sizes) for letters in shapes)


def _count(letters: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the count of numbers in a tensor."""
    return math.prod(fixed_size(x) or sizes.get(x, 1) for x in letters)
