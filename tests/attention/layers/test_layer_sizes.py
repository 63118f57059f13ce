"""Tests of the sizes of a layer, from shapes alone."""

from __future__ import annotations

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_sizes import LayerSizes, sizes_of
from qkv.attention.layers.layout_catalogue import find_layers

HUGE = 1 << 20


def sizes(**shapes: tuple[int, ...]) -> LayerSizes:
    (found,) = find_layers({n.replace("__", "."): shape for n, shape in shapes.items()})
    return sizes_of(layout_catalogue.known()[found.layouts[0]], found.shapes)


def test_sizes_need_no_memory_for_the_tensors() -> None:
    """The matrices have 4 TiB each."""
    square, bias = (HUGE, HUGE), (HUGE,)
    projections = {f"self__{r}__weight": square for r in ("query", "key", "value")}
    found = sizes(**projections, self__query__bias=bias, output__dense__weight=square)
    assert found == LayerSizes(HUGE, HUGE, HUGE, HUGE, HUGE, ("query",))


def test_fused_heads_of_any_number_have_sizes() -> None:
    """Falcon's multi-query form: 71 query heads of width 64, and one key head."""
    found = sizes(
        self_attention__query_key_value__weight=(73 * 64, 71 * 64),
        self_attention__dense__weight=(71 * 64, 71 * 64),
        self_attention__query_key_value__bias=(73 * 64,),
    )
    assert found == LayerSizes(4544, 4544, 64, 64, 4544, ("query", "key", "value"))


def test_fused_heads_without_an_output_projection_have_no_widths() -> None:
    found = sizes(self_attention__query_key_value__weight=(73 * 64, 71 * 64))
    assert found == LayerSizes(hidden_width=4544)


def test_problem_names_the_missing_matrix() -> None:
    found = sizes(q_proj__weight=(4, 4), k_proj__weight=(4, 4))
    assert found.problem.startswith("v_proj.weight or v_lin.weight is missing")
    assert found.hidden_width is None
