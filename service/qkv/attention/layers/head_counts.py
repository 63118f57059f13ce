"""The numbers of heads that the shapes of a layer allow.

No shape shows the number of heads, except where a layer has norms or sinks for each head: a model's
configuration has it. A user who has only the weights chooses among these.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from qkv.attention.layers.layer_sizes import LayerSizes
from qkv.attention.layers.layout_catalogue import Layout

_COMMON_WIDTHS: Final = (64, 128, 32, 80, 96, 256)
"""Widths of heads in published models."""
_WIDE_MODEL: Final = 3072
"""From this model width on, heads of width 128 are more common than those of width 64."""
_MAX_WIDTH: Final = 512
_STEP: Final = 8
_SMALL: Final = 256
"""Widths of heads are multiples of `_STEP`, except in projections with fewer outputs than `_SMALL`
or where no multiple divides them."""


class HeadCount(NamedTuple):
    """Numbers of heads, and the width of each."""

    heads: int
    kv_heads: int
    width: int


def head_counts(layout: Layout, sizes: LayerSizes) -> list[HeadCount]:
    """Returns the numbers of heads that fit a layer, the likeliest first.

    A query projection that no shape shows is as wide as the embeddings.
    """
    hidden, query, key = sizes.hidden_width, sizes.query_width, sizes.key_width
    if hidden is None:
        return []
    if query is None or key is None:
        query = key = hidden
    counts = [] if query < _SMALL else _divided(query, key, _STEP)
    counts = counts or _divided(query, key, 1)
    first = 128 if hidden >= _WIDE_MODEL else 64
    counts.sort(
        key=lambda c: (c.width != first, c.width not in _COMMON_WIDTHS, abs(c.width - first))
    )
    return [
        count
        for count in counts
        if (layout.is_grouped or count.heads == count.kv_heads)
        and sizes.head_width in (None, count.width)
        and sizes.sinks in (None, count.heads)
    ]


def _divided(query: int, key: int, step: int) -> list[HeadCount]:
    """Returns the numbers of heads whose widths are multiples of a step.

    Args:
        query, key: widths of all heads side by side.
        step: of the width of a head.
    """
    divisor = math.gcd(query, key)
    counts = [
        HeadCount(query // width, key // width, width)
        for width in range(step, min(divisor, _MAX_WIDTH) + 1, step)
        if divisor % width == 0
    ]
    return [count for count in counts if count.heads % count.kv_heads == 0]
