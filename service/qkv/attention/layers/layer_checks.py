"""Checks that the weights of a layer fit each other, split into heads, and were loaded."""

from __future__ import annotations

import numpy as np

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES, SINKS, Weights, gate_problem
from qkv.attention.layers.rope import Rope
from qkv.errors import InvalidContent, format_value


def check(layer: Layer) -> None:
    """Checks that the weights fit each other and split into heads.

    Raises:
        InvalidContent: they do not, or a matrix is all zeros.
    """
    if problem := gate_problem(layer.weights):
        raise layer.error(f"{layer.module_of('query')}: {problem}")
    _check_heads(layer)
    check_numbers(layer, layer.weights)
    H, G = layer.heads
    assert H is not None
    assert G is not None
    value_width = layer.weights["value.weight"].shape[1] // G
    output = layer.weights.get("output.weight")
    if output is not None and len(output) != H * value_width:
        raise layer.error(
            f"{layer.name_of('output.weight')} has the wrong size: got {len(output)} inputs, "
            f"expected {H * value_width} for {H} heads of width {value_width}"
        )
    for role, heads in (("query", H), ("key", G)):
        norm = layer.weights.get(f"{role}_norm.weight")
        if norm is not None and len(norm) not in (layer.head_width, heads * layer.head_width):
            raise layer.error(
                f"{layer.name_of(f'{role}_norm.weight')} has the wrong size: got {len(norm)}, "
                f"expected the width of a head, {layer.head_width}, or of all heads, "
                f"{heads * layer.head_width}"
            )
    sinks = layer.weights.get(SINKS)
    if sinks is not None and len(sinks) != H:
        raise layer.error(
            f"{layer.name_of(SINKS)} has the wrong size: got {len(sinks)}, expected {H}, one "
            "for each head"
        )
    _check_rope(layer)
    of_layout, given = layer.layout.alibi, layer.options.alibi
    if of_layout and given and of_layout != given:
        when = "before" if of_layout == "scaled" else "after"
        raise InvalidContent(
            f"alibi is invalid: got {format_value(given)}, expected {format_value(of_layout)}, "
            f"because models of the layout {layer.layout.name} add the biases {when} the scores "
            "are divided by sqrt(D)",
            pointer=f"{layer.pointer}/alibi",
        )


def check_numbers(layer: Layer, weights: Weights) -> None:
    """Checks the numbers of the matrices.

    Args:
        layer: has the names of the tensors.
        weights: of the layer, with numbers.

    Raises:
        InvalidContent: a matrix is all zeros.
    """
    for name, array in weights.items():
        if array.ndim != 2 or array[0, 0]:
            continue
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            is_zero = not array.any()
        if is_zero:
            raise layer.error(
                f"{layer.name_of(name)} is all zeros in its {name.removesuffix('.weight')} "
                "part: such a matrix was probably never loaded"
            )


def _check_heads(layer: Layer) -> None:
    query, key, value = (layer.weights[f"{role}.weight"].shape[1] for role in ROLES)
    heads, kv_heads = layer.options.heads or 1, layer.options.kv_heads
    if query % heads:
        raise InvalidContent(
            f"{layer.module_of('query')} does not split into heads: got {query} outputs, expected "
            f"a multiple of heads={heads}",
            pointer=f"{layer.pointer}/heads",
        )
    width = query // heads
    if kv_heads is not None and (heads % kv_heads or key != kv_heads * width):
        expected = f"{key // width} as the width {key} of {layer.module_of('key')} gives"
        if key % width:
            expected = f"a number with key heads of width {width}, as the query heads have"
        if key == kv_heads * width:
            expected = f"a divisor of heads={heads}"
        raise InvalidContent(
            f"kv_heads is invalid: got {kv_heads}, expected {expected}",
            pointer=f"{layer.pointer}/kv_heads",
        )
    if layer.options.heads is None and key < width and width % key == 0:
        raise InvalidContent(
            f"heads is missing: {layer.module_of('key')} has {key} outputs and "
            f"{layer.module_of('query')} {query}, so there are fewer key heads than query heads",
            pointer=f"{layer.pointer}/heads",
        )
    if key % width or (layer.options.heads is None and key != width):
        multiple = "a multiple of " if layer.options.heads is not None else ""
        raise layer.error(
            f"{layer.module_of('key')} does not fit the query: got {key} outputs, expected "
            f"{multiple}{width}, the width of a query head"
        )
    groups = key // width
    if value % groups:
        raise layer.error(
            f"{layer.module_of('value')} does not split into heads: got {value} outputs, expected "
            f"a multiple of {groups}"
        )
    if heads % groups:
        raise InvalidContent(
            f"heads is invalid: got {heads} query heads, expected a multiple of the {groups} "
            f"key heads of {layer.module_of('key')}",
            pointer=f"{layer.pointer}/heads",
        )


def _check_rope(layer: Layer) -> None:
    rope, width = layer.options.rope, layer.head_width
    if rope is None:
        return
    dims = rope.turning_channels(width)
    if rope.frequencies is not None:
        _check_alone(layer, rope, dims)
    if dims > width or dims % 2:
        field = "dims" if rope.frequencies is None else "frequencies"
        raise InvalidContent(
            f"rope.{field} is invalid: got {dims} channels that turn, expected an even number up "
            f"to {width}, the width of a head",
            pointer=f"{layer.pointer}/rope/{field}",
        )
    if not np.isfinite(rope.radians(width)).all():
        raise InvalidContent(
            "rope is invalid: its numbers give frequencies that are not finite",
            pointer=f"{layer.pointer}/rope",
        )


def _check_alone(layer: Layer, rope: Rope, dims: int) -> None:
    """Checks that nothing beside the frequencies of a rotary embedding gives others."""
    default = Rope.model_fields["base"].default
    for field, is_other in (
        ("base", rope.base != default),
        ("dims", rope.dims not in (None, dims)),
        ("scaling", rope.scaling is not None),
    ):
        if is_other:
            raise InvalidContent(
                f"rope.{field} is not used beside rope.frequencies, which has the numbers of all "
                "pairs: expected one of them",
                pointer=f"{layer.pointer}/rope/{field}",
            )
