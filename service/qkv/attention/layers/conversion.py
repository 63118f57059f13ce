"""Converts weights from one layout to another and checks the result by running both layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.conversion_check import Side, check
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_weights import ROLES, Array, Weights
from qkv.attention.layers.layout_catalogue import Layout, RotaryOrder
from qkv.attention.layers.rope import reordered
from qkv.attention.layers.sent_tensors import Heads, SentTensors
from qkv.errors import InvalidContent, pointer_to


class Converted(NamedTuple):
    """Tensors in the target layout, and the result of the check.

    Attributes:
        tensors: by name.
        options: of a layer with these tensors.
        rotary_order: of the query's and key's channels; None: the conversion did not need it.
        check: largest differences between the outputs of both layers.
    """

    tensors: dict[str, Array]
    options: LayerOptions
    rotary_order: RotaryOrder | None
    check: dict[str, Any]


def convert(
    layer: Layer,
    target: str,
    *,
    bias: Literal["refuse", "augment"] = "refuse",
    grouped: Literal["refuse", "repeat"] = "refuse",
    to_order: RotaryOrder | None = None,
    raise_if_stopped: Callable[[], object] = lambda: None,
) -> Converted:
    """Converts a layer's weights to another layout. Numbers are moved only, so no bit changes.

    Args:
        layer: in the source layout. The rotary order of its options is that of the source.
        target: the name of the target layout.
        bias: "augment" appends each bias to its v1 weight as a last row, for x with a column of
            ones. In the other direction it turns the last row into a bias.
        grouped: "repeat" repeats each key and value head for its query heads, where the target has
            as many of both.
        to_order: the rotary order of the result; None: that of the target layout, else the
            source's.
        raise_if_stopped: called between pieces of the work; it raises to end the conversion.

    Raises:
        InvalidContent: the target layout does not exist, or cannot hold a tensor.
    """
    writer = layout_catalogue.find(target, "/to")
    weights: Weights = layer.weights
    if bias == "augment":
        weights = _augmented(layer, weights, writer)
    rope = layer.options.rope
    from_order = layer.layout.rotary_order if rope is None else layer.rotary_order
    order = to_order or writer.rotary_order or from_order
    if from_order is not None and order is not None and order != from_order:
        dims = None if rope is None else rope.turning_channels(layer.head_width)
        weights = _reordered(layer, weights, dims, order)
    weights, heads = _in_groups(layer, weights, writer, grouped)
    # zeros change no result: gpt2 has them where another layout has no biases
    weights = {
        name: array
        for name, array in weights.items()
        if name in writer.holds or not name.endswith(".bias") or array.any()
    }
    _refuse_what_has_no_place(layer, weights, writer)
    try:
        known = Heads(heads.query if layer.has_heads else None, heads.key)
        written = dict(writer.write(weights, known))
    except InvalidContent as error:
        error.pointer = error.pointer or "/tensors"
        raise
    tensors = {n: np.ascontiguousarray(a) for n, a in _spelled(layer, writer, written).items()}
    result = check(
        Side(layer.layout, _standard(layer), layer.heads, from_order, _widths(layer.weights)),
        Side(writer, written, heads, order if from_order else None, _widths(weights)),
        layer.options,
        raise_if_stopped,
    )
    changes = {
        "layout": target,
        "prefix": None,
        "kv_heads": heads.key if layer.has_heads else None,
        "rope": rope and rope.model_copy(update={"order": order}),
    }
    options = layer.options.model_copy(update=changes)
    return Converted(tensors, options, order if from_order else None, result)


def _augmented(layer: Layer, weights: Weights, writer: Layout) -> Weights:
    """Returns the weights with biases as rows for v1, or with rows of v1 as biases.

    Raises:
        InvalidContent: neither or both of the layouts are v1.
    """
    source = layer.layout.name
    if (source == "v1") == (writer.name == "v1"):
        raise InvalidContent(
            f'bias is "augment": got {source} to {writer.name}, expected a conversion to v1 or '
            "from v1",
            pointer="/bias",
        )
    change = _fold_biases if writer.name == "v1" else _separate_biases
    return change(layer, weights)


def _in_groups(
    layer: Layer, weights: Weights, writer: Layout, grouped: Literal["refuse", "repeat"]
) -> tuple[Weights, Heads]:
    """Returns the weights with as many key heads as the target has, and the numbers of heads.

    Raises:
        InvalidContent: the target has as many key heads as query heads, and the layer has fewer.
    """
    heads = layer.heads
    if writer.is_grouped or heads.query == heads.key:
        return weights, heads
    if grouped == "refuse":
        raise InvalidContent(
            f"{writer.name} has as many key heads as query heads: got {heads.key} key heads and "
            f'{heads.query} query heads. Set "grouped" to "repeat" to repeat each key and '
            "value head for its query heads, exactly",
            pointer="/tensors",
        )
    return _repeated(weights, heads), Heads(heads.query, heads.query)


def _widths(weights: Weights) -> list[int]:
    return [len(weights[f"{role}.weight"]) for role in ROLES]


def _standard(layer: Layer) -> Weights:
    """Returns the layer's tensors by the names of the layout."""
    return {name: layer.tensors[sent] for name, sent in layer.names.items()}


def _spelled(layer: Layer, writer: Layout, tensors: Weights) -> Weights:
    """Returns the tensors with the spelling of the source's modules, where the target has it."""
    sent = SentTensors(layer.tensors, "", layer.options.prefix or "", layer.layout.spellings)
    own = writer.name == layer.layout.name
    stems = {s: n for s, n in sent.stems.items() if own or n in writer.spellings.get(s, ())}
    renamed = {}
    for name, array in tensors.items():
        stem = next((s for s in stems if name == s or name.startswith(f"{s}.")), "")
        renamed[stems.get(stem, "") + name.removeprefix(stem)] = array
    return renamed


def _reordered(layer: Layer, weights: Weights, dims: int | None, order: str) -> dict[str, Array]:
    """Returns the weights with the channels of queries and keys in another rotary order.

    Raises:
        InvalidContent: the number of heads is not given.
    """
    if layer.options.heads is None:
        raise InvalidContent(
            "heads is missing: the rotary order of the target is another, and rows move within "
            "each head",
            pointer="/heads",
        )
    if (dims or layer.head_width) % 2:
        raise InvalidContent(
            f"rope.dims is invalid: got {layer.head_width}, the width of a head, expected an even "
            "number, because rotary channels turn in pairs",
            pointer="/rope/dims",
        )
    changed = dict(weights)
    for role in ("query", "key"):
        heads = layer.head_count(role)
        for name in (f"{role}.weight", f"{role}.bias", f"{role}_norm.weight"):
            if name in weights:
                array = weights[name]
                per_head = name.endswith("_norm.weight") and len(array) == layer.head_width
                changed[name] = reordered(array, 1 if per_head else heads, dims, order)
    return changed


def _repeated(weights: Weights, heads: Heads) -> dict[str, Array]:
    """Returns the weights with one key head and one value head for each query head."""
    assert heads.query is not None
    assert heads.key is not None
    repeated = dict(weights)
    for role in ("key", "value"):
        for name in (f"{role}.weight", f"{role}.bias"):
            if name in weights:
                array = weights[name]
                split = array.reshape(*array.shape[:-1], heads.key, -1)
                times = np.repeat(split, heads.query // heads.key, axis=-2)
                repeated[name] = times.reshape(*array.shape[:-1], -1)
    return repeated


def _refuse_what_has_no_place(layer: Layer, weights: Weights, writer: Layout) -> None:
    for name in weights:
        role, _, kind = name.rpartition(".")
        if (role in ROLES and kind == "weight") or name in writer.holds:
            continue
        sent = layer.name_of(name)
        holders = [n for n, layout in layout_catalogue.known().items() if name in layout.holds]
        detail = (
            f"{sent} has no place in {writer.name}: got {name.replace('.', ' ')}, expected a "
            f"target that holds it: {', '.join(holders)}"
        )
        if writer.name == "v1" and role in ROLES:
            detail += (
                '. Set "bias" to "augment" to store each bias as one more row of its weight, '
                "exactly, for x with a column of ones"
            )
        raise InvalidContent(detail, pointer=f"/tensors{pointer_to(sent)}")


def _fold_biases(_layer: Layer, weights: Weights) -> dict[str, Array]:
    """Appends each bias to its weight as a last row; a row of zeros where there is none."""
    folded = {n: a for n, a in weights.items() if n.removesuffix(".bias") not in ROLES}
    for role in ROLES:
        weight, bias = weights[f"{role}.weight"], weights.get(f"{role}.bias")
        row = np.zeros_like(weight[:1]) if bias is None else bias
        folded[f"{role}.weight"] = np.vstack([weight, row])
    return folded


def _separate_biases(layer: Layer, weights: Weights) -> dict[str, Array]:
    """Inverts `_fold_biases`: the last row of each weight becomes a bias.

    Raises:
        InvalidContent: a weight has one row only.
    """
    separated = dict(weights)
    for role in ROLES:
        weight = weights[f"{role}.weight"]
        if len(weight) < 2:
            name = layer.name_of(f"{role}.weight")
            raise InvalidContent(
                f"{name} has no row for a bias: got shape {list(weight.shape)}, expected at "
                "least 2 rows",
                pointer=f"/tensors{pointer_to(name)}",
            )
        separated[f"{role}.weight"], separated[f"{role}.bias"] = weight[:-1], weight[-1]
    return separated
