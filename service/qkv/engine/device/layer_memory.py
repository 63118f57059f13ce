"""The weights of loaded layers on a device: each layer once, the ones that were used last."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import Array

_log = logging.getLogger("qkv.engine")

LAYER_BYTES: Final = 8 << 30
"""Bytes of layers that a device holds by default."""


class LayerMemory:
    """The weights of loaded layers on a device; safe across threads.

    A layer is copied when a batch first uses it. A batch refers to its weights until its outputs
    are there. So a layer that has to leave stays in memory as long as a batch uses it.

    Args:
        load: copies tensors to the device; on a CPU it returns them, and no layer is copied.
        max_bytes: what the layers may take together.

    Attributes:
        held_bytes: what they take.
    """

    def __init__(
        self, load: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], max_bytes: int
    ) -> None:
        self._load, self._max_bytes = load, max_bytes
        self._held: OrderedDict[str, tuple[Mapping[str, Tensor], int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def weights_of(self, layer: Layer) -> Mapping[str, Tensor]:
        """Returns the weights of a loaded layer on the device."""
        assert layer.loaded is not None
        name = layer.loaded.name
        with self._lock:
            if (entry := self._held.get(name)) is not None:
                self._held.move_to_end(name)
                return entry[0]
            size = layer.nbytes
            while self._held and self.held_bytes + size > self._max_bytes:
                self._drop_oldest()
            with torch.inference_mode():
                weights = self._load({n: _as_tensor(a) for n, a in layer.weights.items()})
            if size <= self._max_bytes:
                self._held[name] = weights, size
                self.held_bytes += size
        return weights

    def preload(self, layers: Iterable[Layer]) -> None:
        """Copies layers to the device, as long as they fit: none makes room for another one."""
        for layer in layers:
            if self.held_bytes + layer.nbytes > self._max_bytes:
                _log.warning(
                    "the device gets %d layers before the first request: the next one exceeds "
                    "QKV_MAX_DEVICE_LAYER_BYTES", len(self._held),
                )  # fmt: skip
                return
            try:
                self.weights_of(layer)
            except Exception:  # a request that names the layer gets the error
                _log.exception("a layer could not be copied to the device")
                return

    def clear(self) -> None:
        """Drops all layers: the device has run out of memory."""
        with self._lock:
            while self._held:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, size) = self._held.popitem(last=False)
        self.held_bytes -= size


def _as_tensor(array: Array) -> Tensor:
    """Returns a view of a dense array as a tensor."""
    if array.dtype.name == "bfloat16":  # torch does not know numpy's
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
