"""The layers that the operator loaded: requests name them, and `GET /v1/layers` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qkv.attention.layers.layer import Layer
from qkv.errors import InvalidContent, NotFound, format_value

_LISTED: Final = 8  # names in an error


@dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A checkpoint of the settings.

    Attributes:
        name: in the settings.
        layers: by their whole names; none if there is a problem.
        problem: the reason why it is not served; None: it is.
        unserved: the reason why layers are not served beside others that are, by the path of the
            modules around their blocks.
    """

    name: str
    layers: Mapping[str, Layer]
    problem: str | None = None
    unserved: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return sum(layer.nbytes for layer in self.layers.values())


class LoadedLayers:
    """The loaded layers by name. They do not change while the service runs.

    Args:
        checkpoints: those of the settings, in order.

    Attributes:
        checkpoints: as the argument.
    """

    def __init__(self, checkpoints: Sequence[LoadedCheckpoint] = ()) -> None:
        self.checkpoints = tuple(checkpoints)
        self._layers = {name: layer for c in checkpoints for name, layer in c.layers.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def __getitem__(self, name: str) -> Layer:
        return self._layers[name]

    @property
    def names(self) -> Sequence[str]:
        """The names of all layers."""
        return list(self._layers)

    def find(self, name: object) -> Layer:
        """Returns the layer that the field `name` of a request names.

        Raises:
            InvalidContent: there is no such layer.
        """
        if isinstance(name, str) and name in self._layers:
            return self._layers[name]
        raise InvalidContent(
            f"layer.name is unknown: got {format_value(name)}, expected {self._listing()}",
            pointer="/layer/name",
        )

    def describe(self, name: str) -> dict[str, Any]:
        """Returns the description of a layer as JSON.

        Raises:
            NotFound: there is no such layer.
        """
        if name not in self._layers:
            raise NotFound(
                f"no layer {name!r:.200}: got an unknown name, expected {self._listing()}"
            )
        layer = self._layers[name]
        assert layer.loaded is not None
        options = layer.options.model_dump(
            exclude={"layout", "prefix", "heads", "kv_heads", "input", "softcap", "window"}
        )
        if not {"query_norm.weight", "key_norm.weight"} & layer.weights.keys():
            options["qk_norm"] = None
        H, G = layer.heads
        return {
            "name": name,
            "layout": layer.layout.name,
            "prefix": (layer.options.prefix or "").rstrip("."),
            "dtype": layer.dtype,
            "heads": H,
            "kv_heads": G,
            "head_width": layer.head_width,
            "width": len(layer.weights["query.weight"]),
            "output_width": layer.output_width,
            **options,
            "parameters": dict(layer.loaded.parameters),
            "inputs": ["attention", *(["residual"] if layer.loaded.norm is not None else [])],
            "ignored": list(layer.loaded.ignored),
            "proof": layer.loaded.proof,
            "max_length": layer.loaded.max_length,
            "bytes": layer.nbytes,
        }

    def _listing(self) -> str:
        if not self._layers:
            return "no name, because the service has loaded no checkpoint"
        names = list(self._layers)
        more = ", ... (GET /v1/layers has all)" if len(names) > _LISTED else ""
        return f"{', '.join(names[:_LISTED])}{more}"


NO_LAYERS: Final = LoadedLayers()
"""The layers of a service without checkpoints."""
