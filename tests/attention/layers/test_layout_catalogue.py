"""The layers of a whole model are found by the names and shapes of its tensors."""

from __future__ import annotations

import time

from qkv.attention.layers.layout_catalogue import find_layers


def model(layers: int) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{i}.{name}.weight": (8, 8)
        for i in range(layers)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    }


def test_layers_have_their_prefix_layouts_and_own_tensors() -> None:
    shapes = model(11) | {"lm_head.weight": (100, 8)}
    found = find_layers(shapes)
    assert [layer.prefix for layer in found] == [f"model.layers.{i}.self_attn." for i in range(11)]
    assert {tuple(layer.layouts) for layer in found} == {("llama",)}
    assert set(found[1].shapes) == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}


def test_layer_without_a_prefix_is_found_beside_others() -> None:
    shapes = {"q_proj.weight": (8, 8), "cross.q_proj.weight": (4, 4)}
    assert {layer.prefix: dict(layer.shapes) for layer in find_layers(shapes)} == {
        "": {"q_proj.weight": (8, 8)},
        "cross.": {"q_proj.weight": (4, 4)},
    }


def test_time_does_not_grow_with_the_square_of_the_layers() -> None:
    started_at = time.perf_counter()
    assert len(find_layers(model(5000))) == 5000
    assert time.perf_counter() - started_at < 20  # a pass over all names for each took minutes
