"""The sizes of an attention layer, from the shapes of its tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.attention.layers.layer_weights import ROLES, gate_problem
from qkv.attention.layers.layout_catalogue import Layout, Shapes
from qkv.attention.layers.sent_tensors import SentTensors
from qkv.errors import InvalidContent


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
