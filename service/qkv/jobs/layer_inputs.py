"""The layer of a request: its fields, and its tensors as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pydantic

from qkv.attention.layers import layer_checks
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import NESTED_FIELDS, LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.errors import InvalidContent, pointer_to
from qkv.jobs.fields import JobFields, field_error
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message

_OF_CHECKPOINT: Final = ("layout", "prefix")  # fields that a request cannot change


def layer_of(options: LayerOptions, dtype: str, message: Message) -> Layer:
    """Returns the layer of a request.

    Args:
        options: its fields.
        dtype: for tensors without a dtype.
        message: the request.

    Raises:
        InvalidContent: a tensor is wrong.
    """
    return read_layer(options, arrays_of(message.layer, dtype, "layer", "tensors"))


def arrays_of(tensors: Mapping[str, RawTensor], dtype: str, *path: str) -> dict[str, Array]:
    """Returns tensors of a layer as arrays.

    Integers and booleans with a dtype stay as they are: a state dict has buffers of positions and
    masks beside the weights. The layout rejects them if they stand for a weight.

    Args:
        tensors: by name.
        dtype: for tensors without a dtype.
        *path: parts of the JSON pointer to them.

    Raises:
        InvalidContent: a tensor without a dtype has no numbers.
    """
    return {
        name: raw.numpy()
        if not raw.is_untyped and raw.dtype not in FLOATING
        else cast_untyped(raw, name, FLOATING, dtype, pointer_to(*path, name)).numpy()
        for name, raw in tensors.items()
    }


def parse_layer_options(fields: JobFields) -> LayerOptions | None:
    """Returns the fields of a request's layer; None if it has no layer.

    Raises:
        InvalidContent: a field is unknown, mistyped or out of bounds.
    """
    if fields.layer is None:
        return None
    try:
        return LayerOptions.model_validate(fields.layer)
    except pydantic.ValidationError as error:
        known = [*LayerOptions.model_fields, "tensors"]
        raise field_error(error, known, "layer", nested=NESTED_FIELDS) from None


def find_loaded(fields: JobFields, message: Message, layers: LoadedLayers) -> Layer | None:
    """Returns the loaded layer that a request names, with the fields that the request changes.

    Returns:
        None if the request names no layer.

    Raises:
        InvalidContent: there is no such layer, or a field does not fit it.
    """
    given = fields.layer
    if given is None or "name" not in given:
        return None
    layer = layers.find(given["name"])
    if message.layer:
        raise InvalidContent(
            "layer.tensors is not allowed: the layer of this name is loaded",
            pointer=pointer_to("layer", "tensors"),
        )
    changes = {name: value for name, value in given.items() if name != "name"}
    for name in ("heads", "kv_heads"):  # null: as the checkpoint has them
        if changes.get(name, ...) is None:
            del changes[name]
    return _changed(layer, changes) if changes else layer


def _changed(layer: Layer, changes: Mapping[str, object]) -> Layer:
    """Returns a loaded layer with other fields.

    Raises:
        InvalidContent: a field does not fit the layer.
    """
    assert layer.loaded is not None
    for name in _OF_CHECKPOINT:
        if name in changes:
            raise InvalidContent(
                f"layer.{name} is not allowed: {layer.loaded.name} is loaded, and has its own",
                pointer=pointer_to("layer", name),
            )
    try:
        options = LayerOptions.model_validate({**layer.options.model_dump(), **changes})
    except pydantic.ValidationError as error:
        known = [n for n in LayerOptions.model_fields if n not in _OF_CHECKPOINT]
        raise field_error(error, ["name", *known], "layer", nested=NESTED_FIELDS) from None
    has_norms = not {"query_norm.weight", "key_norm.weight"}.isdisjoint(layer.weights)
    if changes.get("qk_norm") is not None and not has_norms:
        raise InvalidContent(
            f"layer.qk_norm is not used: {layer.loaded.name} has no norm of queries and keys",
            pointer=pointer_to("layer", "qk_norm"),
        )
    has_heads = (options.heads, options.kv_heads) == (layer.options.heads, layer.options.kv_heads)
    if layer.layout.needs_heads and not has_heads:
        raise InvalidContent(
            f"layer.heads is invalid: got {options.heads} and kv_heads {options.kv_heads}, "
            f"expected {layer.options.heads} and {layer.options.kv_heads}, because the layout "
            f"{layer.layout.name} keeps the tensors of a head together",
            pointer=pointer_to("layer", "heads"),
        )
    if options.input == "residual" and layer.loaded.norm is None:
        raise InvalidContent(
            f"layer.input is invalid: got 'residual', expected 'attention', because "
            f"{layer.loaded.name} is loaded without a norm in front of its attention: x is what "
            "its attention module receives",
            pointer=pointer_to("layer", "input"),
        )
    loaded = layer.loaded
    if changes.keys() - {"input"}:  # it is no more what was compared with the real module
        loaded = loaded._replace(proof=None)
    changed = replace(layer, options=options, loaded=loaded)
    layer_checks.check(changed)
    return changed
