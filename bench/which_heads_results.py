"""The results of bench/which_heads.py, from which it makes the page and the figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from head_effects import Effect, Head

from qkv.models.head_comparison import HeadComparison
from qkv.models.head_row import HeadRow

__all__ = ["CONTROL", "ORDERS", "Results", "value_of"]

CONTROL: Final = "equal"
"""The name of the control on the page."""
ORDERS: Final = {
    "effect": "least effect alone first",
    "closest": "least error first",
    "random": "random order",
    "farthest": "largest error first",
}
"""The orders of the heads, with their names on the page."""


class Results(NamedTuple):
    """All measurements of the page.

    Attributes:
        sentences: that were embedded.
        tokens: the number of tokens of each.
        comparison: of all variants with softmax.
        rows: of each variant, by head.
        orders: of the heads of each variant, by the name of the order.
        single: the effect of each head alone, for each variant.
        effects: by variant, order and number of heads.
        example: the text that the program of the page prints.
    """

    sentences: Sequence[str]
    tokens: Sequence[int]
    comparison: HeadComparison
    rows: Mapping[str, Mapping[Head, HeadRow]]
    orders: Mapping[str, Mapping[str, Sequence[Head]]]
    single: Mapping[str, Mapping[Head, Effect]]
    effects: Mapping[tuple[str, str, int], Effect]
    example: str = ""

    @property
    def variants(self) -> list[str]:
        """The variants without the control."""
        return [name for name in self.rows if name != CONTROL]

    def by_k(self, variant: str, order: str) -> dict[int, Effect]:
        """Returns the effects of an order by the number of heads."""
        return {k: e for (v, o, k), e in self.effects.items() if (v, o) == (variant, order)}

    def errors(self, variant: str) -> dict[Head, float]:
        """Returns the relative error of each head, the closest first."""
        return {
            h: value_of(self.rows[variant][h].relative_error)
            for h in self.orders[variant]["closest"]
        }

    def order_line(self, variant: str, order: str) -> list[tuple[int, float]]:
        """Returns the mean cosine by the number of heads; of random orders their mean."""
        names = [n for n in self.orders[variant] if n.partition(" ")[0] == order]
        found = [self.by_k(variant, name) for name in names]
        ks = sorted(found[0])
        return [(k, statistics.fmean(each[k].mean_cosine for each in found)) for k in ks]


def value_of(number: float | None) -> float:
    """Returns NaN for None."""
    return math.nan if number is None else number
