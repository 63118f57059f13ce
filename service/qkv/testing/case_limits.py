"""Limits of the cases of /v1/verify: `check_cost` reads the sizes before anything is drawn.

A wrong output costs the most: the diagnosis runs up to 250 wrong variants in float64. At the limits
it takes up to 1.5 s of one core for `softmax`, and up to 4 s for `taylor` with 64 heads. A right
output takes at most 0.3 s, usually 0.01 s.
"""

from __future__ import annotations

import math
from typing import Final

from qkv.attention.catalogue import find
from qkv.attention.signature import fixed_size
from qkv.errors import PayloadTooLarge
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


def check_cost(spec: CaseSpec) -> None:
    """Checks that a case can be drawn and judged in little time.

    `linear_layer` has O rows of I scores. `mean` has no queries: its S running averages count as
    S / 32 queries. Keys and mixtures of keys need one matrix product: they count as 1/64.

    Raises:
        NotFound: the variant does not exist.
        InvalidContent: another field is invalid, or the family does not fit.
        PayloadTooLarge: a size is too large.
    """
    sizes = spec.choose_sizes()
    columns = sizes.get("S", sizes.get("I", 1))
    products = -(-sizes.get("R", columns) // (64 if "D" in sizes or "I" in sizes else 32))
    rows = max(sizes.get("L", sizes.get("O", 1)), products)
    width = max(sizes.get("D", 1), sizes.get("E", 1))
    heads = sizes.get("B", 1) * sizes.get("H", sizes.get("J", 1))
    scores = heads * rows * columns
    for name, size, limit in (
        ("B H", heads, MAX_HEADS),
        ("the largest of D and E", width, MAX_WIDTH),
        ("B H L S", scores, MAX_SCORES),
        ("B H L S max(D, E)", scores * width, MAX_PRODUCTS),
        ("numbers", _number_count(spec, sizes), MAX_NUMBERS),
    ):
        if size > limit:
            raise PayloadTooLarge(
                f"the case is too large: got {size} for {name}, expected at most {limit}",
                pointer="/sizes",
                limit=limit,
            )


def _number_count(spec: CaseSpec, sizes: dict[str, int]) -> int:
    """Returns the count of numbers in the inputs that the family draws, and in the output."""
    variant, keyword = find(spec.variant), FAMILIES[spec.family].keyword
    drawn = {i.name for i in variant.inputs.values() if not i.is_optional}
    drawn |= {*variant.random_input_names, keyword} & variant.inputs.keys()
    shapes = [variant.inputs[n].letters for n in drawn] + [variant.outputs["output"].letters]
    return sum(math.prod(fixed_size(x) or sizes.get(x, 1) for x in letters) for letters in shapes)
