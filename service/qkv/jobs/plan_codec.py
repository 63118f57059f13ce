"""Encodes plans for other processes of the service, by pickle.

What every process has, such as variants, layouts and loaded layers, is sent by its name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import hollow
from qkv.jobs.loaded.loaded_layers import NO_LAYERS, LoadedLayers

__all__ = ["decode", "encode"]

_LAYER: Final = "loaded layer"


def encode(plan: object) -> bytes:
    """Returns a plan as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(plan)
    return buffer.getvalue()


def decode(data: bytes, layers: LoadedLayers = NO_LAYERS) -> Any:
    """Returns the plan that `encode` encoded. Pickle runs what it is told: only for bytes of this
    service.

    Args:
        data: the plan.
        layers: those that the operator loaded.
    """
    return _Unpickler(io.BytesIO(data), layers).load()


class _Pickler(pickle.Pickler):
    """Names what every process has; leaves out the numbers of arrays, which a plan has not."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if isinstance(value, Layer) and value.loaded is not None:
            return _LAYER, value.loaded.name, value.options
        return _names().get(id(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, np.ndarray):
            return hollow, (value.dtype, value.shape)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: LoadedLayers) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, id: tuple[Any, ...]) -> object:
        if id[0] == _LAYER:
            _, name, options = id  # a request may have changed the options
            return replace(self._layers[name], options=options)
        return _known()[id]


@cache
def _known() -> Mapping[tuple[str, str], object]:
    """Returns the objects that every process has, by kind and name."""
    known: dict[tuple[str, str], object] = {}
    for name, variant in catalogue.variants().items():
        known["variant", name] = variant
        known["parameters", name] = variant.parameters
    for name, layout in layout_catalogue.known().items():
        known["layout", name] = layout
    return known


@cache
def _names() -> Mapping[int, tuple[str, str]]:
    return {id(value): name for name, value in _known().items()}
