"""The sizes of an attention layer, and the numbers of heads that they allow, from its shapes.

No shape shows the number of heads, except where a layer has norms or sinks for each head: a model's
configuration has it. A user who has only the weights chooses among these.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from qkv.attention.layers.layer_weights import ROLES, gate_problem
from qkv.attention.layers.layout_catalogue import Layout, Shapes
from qkv.attention.layers.sent_tensors import SentTensors
from qkv.errors import InvalidContent

_COMMON_WIDTHS: Final = (64, 128, 32, 80, 96, 256)
"""Widths of heads in published models."""
_WIDE_MODEL: Final = 3072
"""From this model width on, heads of width 128 are more common than those of width 64."""
_MAX_WIDTH: Final = 512
_STEP: Final = 8
_SMALL: Final = 256
"""Widths of heads are multiples of `_STEP`, except in projections with fewer outputs than `_SMALL`
or where no multiple divides them."""


class LayerSizes(NamedTuple):
    """The sizes of a layer; None: the shapes do not show it.

    Attributes:
        hidden_width: of the embeddings M.
        query_width, key_width, value_width: of all heads side by side.
        output_width: of the output projection's result; None: there is no output projection.
        biases: the projections that have one: "query", "key", "value", "output".
        norms: the projections that have a QK-norm: "query", "key".
        head_width: of a head, where a norm shows it.
        sinks: the number of query heads, where attention sinks show it.
        problem: the reason why the layer cannot be read; "" if there is none.
    """

    hidden_width: int | None = None
    query_width: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    output_width: int | None = None
    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    head_width: int | None = None
    sinks: int | None = None
    problem: str = ""


def sizes_of(layout: Layout, shapes: Shapes) -> LayerSizes:
    """Returns the sizes of a layer.

    Args:
        layout: of the layer.
        shapes: of its tensors, by name without the prefix.
    """
    # views of one number, which `read` does not copy; no layout reads more than two axes
    selected = layout.select(shapes)
    arrays = {n: np.broadcast_to(np.float16(0), s) for n, s in selected.items() if len(s) <= 2}
    sent = SentTensors(arrays, "", "", layout.spellings)
    try:
        weights = layout.read(sent)
    except InvalidContent as error:
        if error.pointer == "/heads":
            return _fused_sizes(layout, shapes)
        return LayerSizes(problem=error.detail)
    if problem := gate_problem(weights):
        return LayerSizes(problem=problem)
    widths = {role: int(weights[f"{role}.weight"].shape[1]) for role in ROLES}
    output, sinks = weights.get("output.weight"), weights.get("sinks")
    norm = weights.get("query_norm.weight")
    is_of_heads = norm is not None and len(norm) < widths["query"]
    return LayerSizes(
        hidden_width=len(weights["query.weight"]),
        query_width=widths["query"],
        key_width=widths["key"],
        value_width=widths["value"],
        output_width=None if output is None else int(output.shape[1]),
        biases=tuple(r for r in (*ROLES, "output") if f"{r}.bias" in weights),
        norms=tuple(r for r in ROLES if f"{r}_norm.weight" in weights),
        head_width=len(norm) if norm is not None and is_of_heads else None,
        sinks=None if sinks is None else len(sinks),
    )


def _fused_sizes(layout: Layout, shapes: Shapes) -> LayerSizes:
    """Returns the sizes of a layer whose layout keeps the projections in one matrix by heads.

    Its heads are as wide for values as for queries and keys. So the output projection takes as many
    channels as the query has, and key and value share the rest of the rows.
    """
    fused = next(name for name in layout.query_names if name in shapes)
    rows, hidden = shapes[fused]
    matrices = (n for n, s in shapes.items() if len(s) == 2 and n != fused)
    output = next(matrices, None)
    query = None if output is None else shapes[output][1]
    key = None if query is None else (rows - query) // 2
    if key is not None and key < 1:
        return LayerSizes(
            problem=f"{fused} has too few rows: got {rows}, expected more than the {query} inputs "
            f"of {output}"
        )
    has_bias = {
        role: name is not None and name.replace(".weight", ".bias") in shapes
        for role, name in (*((r, fused) for r in ROLES), ("output", output))
    }
    return LayerSizes(
        hidden_width=hidden,
        query_width=query,
        key_width=key,
        value_width=key,
        output_width=None if output is None else shapes[output][0],
        biases=tuple(role for role, has in has_bias.items() if has),
    )


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
