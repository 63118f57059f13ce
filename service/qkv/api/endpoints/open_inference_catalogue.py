"""The models of the Open Inference Protocol: the variants, and the loaded layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from qkv.attention import catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Input, Output
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, NotFound
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.telemetry.worker_state import SharedState

VERSION: Final = "1"
"""The only version of every model."""

LAYER_VARIANT: Final = "softmax"
"""The variant of a loaded layer if a request does not name another one."""


@dataclass(frozen=True, eq=False)
class Model:
    """A variant, or a loaded layer with the variant that it runs by default.

    Attributes:
        name: of the model.
        variant: that runs.
        layer: that projects the input x; None: the model is the variant.
    """

    name: str
    variant: Variant
    layer: Layer | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        """The inputs, tensors of a state included; those of a layer have x (B, L, M) in place of
        query, key and value."""
        inputs, layer = self.variant.tensors, self.layer
        if layer is None:
            return list(inputs.values())
        width = str(len(layer.weights["query.weight"]))
        x = replace(inputs["query"], name="x", letters=("B", "L", width), dtypes=(layer.dtype,))
        given = layer.variant_inputs.union(ROLES)
        return [x, *(spec for name, spec in inputs.items() if name not in given)]

    @property
    def outputs(self) -> Sequence[Output]:
        """The outputs; that of a layer is (B, L, M)."""
        outputs, layer = self.variant.outputs, self.layer
        if layer is None:
            return list(outputs.values())
        heads, groups = layer.heads.query or 1, layer.heads.key or 1
        width = layer.output_width or layer.weights["value.weight"].shape[1] // groups * heads
        merged = replace(outputs["output"], letters=("B", "L", str(width)))
        return [merged if spec.name == "output" else spec for spec in outputs.values()]


class ModelCatalogue:
    """The models by name.

    Args:
        shared_state: has the loaded flags of the models.
        layers: those that the operator loaded.
    """

    def __init__(self, shared_state: SharedState, layers: LoadedLayers) -> None:
        self._shared_state, self._layers = shared_state, layers

    @property
    def names(self) -> Sequence[str]:
        """The names of all models, loaded or not."""
        return self._shared_state.models

    def is_loaded(self, name: str) -> bool:
        """Returns True if the model exists and is loaded."""
        return self._shared_state.is_loaded(name)

    def find(self, name: str, version: str = VERSION) -> Model:
        """Returns a model, loaded or not.

        Raises:
            NotFound: the model or the version does not exist.
        """
        if name not in self.names:
            raise NotFound(f"Request for unknown model: {name!r:.60} is not found")
        if version != VERSION:
            raise NotFound(
                f"Request for unknown model: {name!r} version {version!r:.20} is not found; "
                f"there is version {VERSION}"
            )
        if name in self._layers:
            return Model(name, catalogue.find(LAYER_VARIANT), self._layers[name])
        return Model(name, catalogue.find(name))

    def find_loaded(self, name: str, version: str = VERSION) -> Model:
        """Returns a loaded model.

        Raises:
            NotFound: the model or the version does not exist, or the model is unloaded.
        """
        model = self.find(name, version)
        if not self.is_loaded(name):
            raise NotFound(f"Request for unknown model: {name!r} has no available versions")
        return model

    def load(self, name: str, *, loaded: bool = True) -> None:
        """Loads or unloads a variant in all workers.

        Raises:
            NotFound: the model does not exist.
            InvalidContent: it is a loaded layer.
        """
        if self.find(name).layer is not None:
            raise InvalidContent(
                f"{name} cannot be {'' if loaded else 'un'}loaded while the service runs: it is a "
                "layer of a checkpoint, which is loaded at start"
            )
        self._shared_state.load(name, loaded=loaded)


def default_output(variant: Variant) -> str:
    """Returns the output of a request that names none."""
    return "output" if "output" in variant.outputs else next(iter(variant.outputs))
