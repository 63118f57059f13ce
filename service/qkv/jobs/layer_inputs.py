"""The layer of a request: its fields, and its tensors as arrays."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import NESTED_FIELDS, LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.errors import pointer_to
from qkv.jobs.fields import JobFields, field_error
from qkv.tensors import FLOATING, RawTensor
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message

__all__ = ["arrays_of", "layer_of", "parse_layer_options"]


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
