"""The layers of a whole model are found by the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class CountedNames(dict[str, Any]):
    """Shapes by name, with the number of the names that were read."""

    count = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.count += 1
            yield name

    def items(self) -> Any:
        for name in self:
            yield name, self[name]


def test_passes_over_the_names_do_not_grow_with_the_layers() -> None:
    counts = []
    for layers in (10, 1000):
        shapes = CountedNames(model(layers))
        assert len(find_layers(shapes)) == layers
        counts.append(shapes.count / len(shapes))
    assert counts[0] == counts[1] > 0
