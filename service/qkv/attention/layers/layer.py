"""A layer around a variant: the weights that project embeddings to query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from qkv.attention.layers import alibi
from qkv.attention.layers.input_norm import InputNorm
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_weights import ROLES, SINKS, Array, Weights, hollow
from qkv.attention.layers.layout_catalogue import Layout, RotaryOrder
from qkv.attention.layers.sent_tensors import Heads, KnownTensors
from qkv.errors import InvalidContent

FREQUENCIES = "rope.frequencies"
"""The name of the rotary frequencies among the arrays of a layer."""
SLOPES = "alibi_slopes"
"""An input of the variant that a layer with ALiBi gives."""


class LoadedProperties(NamedTuple):
    """The properties of a layer that the operator loaded from a checkpoint.

    Attributes:
        name: of the layer in requests.
        parameters: of a variant, as the checkpoint's configuration has them.
        norm: in front of the attention; None: there is none, or it is not known.
        ignored: fields of the checkpoint's configuration that its operator passes over.
        proof: error, length and versions of a description that was compared with the real module;
            None: it was not.
        max_length: tokens for which the description holds; None: any number.
    """

    name: str
    parameters: Mapping[str, Any]
    norm: InputNorm | None
    ignored: tuple[str, ...] = ()
    proof: Mapping[str, Any] | None = None
    max_length: int | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer, and how they split into heads.

    Attributes:
        options: the request's fields; layout and prefix are not "auto" and None any more.
        layout: the layout of the tensors in the request.
        tensors: the tensors of the layer as the request has them; none if it is loaded.
        names: the name in the request of each tensor, by its name in the layout.
        weights: the same numbers, independent of the layout.
        ignored: names of tensors that belong to no part of the attention.
        pointer: JSON pointer to the layer.
        loaded: what a loaded layer has; None: the request has the tensors.
    """

    options: LayerOptions
    layout: Layout
    tensors: Mapping[str, Array]
    names: Mapping[str, str]
    weights: Weights
    ignored: tuple[str, ...]
    pointer: str = "/layer"
    loaded: LoadedProperties | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self.weights["query.weight"].dtype.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for array in self.weights.values())

    @property
    def has_heads(self) -> bool:
        """True if the outputs of the variant have an axis of heads."""
        return self.options.heads is not None

    @property
    def output_width(self) -> int | None:
        """The width of the output projection's result; None: there is no output projection."""
        weight = self.weights.get("output.weight")
        return None if weight is None else int(weight.shape[1])

    @property
    def rotary_order(self) -> RotaryOrder:
        """The order of the channels that a rotary embedding turns together."""
        rope = self.options.rope
        return (rope and rope.order) or self.layout.rotary_order or "half"

    @property
    def heads(self) -> Heads:
        """The numbers of query heads and key heads."""
        return Heads(self.head_count("query"), self.head_count("key"))

    @property
    def head_width(self) -> int:
        """The width D of a query head."""
        return int(self.weights["query.weight"].shape[1]) // (self.options.heads or 1)

    @cached_property
    def variant_inputs(self) -> frozenset[str]:
        """Inputs of the variant that the layer gives, beside query, key and value."""
        names = ((SINKS, SINKS in self.weights), (SLOPES, bool(self.options.alibi)))
        return frozenset(name for name, has in names if has)

    @cached_property
    def arrays(self) -> Mapping[str, Array]:
        """The arrays that a run needs: the weights, rotary frequencies (float64) and slopes."""
        return {**self.weights, **self.position_arrays}

    @cached_property
    def position_arrays(self) -> Mapping[str, Array]:
        """The arrays of a run that follow from the fields: frequencies and slopes."""
        arrays = {}
        if self.options.rope is not None:
            arrays[FREQUENCIES] = self.options.rope.radians(self.head_width)
        if self.options.alibi:
            exact = np.float64 if self.weights["query.weight"].dtype == np.float64 else np.float32
            arrays[SLOPES] = alibi.slopes(self.options.heads or 1).astype(exact)
        return arrays

    @property
    def description(self) -> dict[str, Any]:
        """Name, layout, prefix, heads and ignored names, as JSON."""
        name = {} if self.loaded is None else {"name": self.loaded.name}
        return name | {
            "layout": self.layout.name,
            "prefix": (self.options.prefix or "").rstrip("."),
            "heads": self.options.heads,
            "kv_heads": self.heads.key if self.has_heads else None,
            "ignored": list(self.ignored),
        }

    def without_numbers(self) -> Layer:
        """Returns the layer with arrays of the same shapes and dtypes that hold no memory.

        A loaded layer keeps its arrays, which all requests share.
        """
        if self.loaded is not None:
            return self
        return replace(
            self,
            tensors={name: hollow(a.dtype, a.shape) for name, a in self.tensors.items()},
            weights={name: hollow(a.dtype, a.shape) for name, a in self.weights.items()},
        )

    def with_numbers(self, tensors: Mapping[str, Array]) -> Layer:
        """Returns the layer with the numbers of tensors of the same names, dtypes and shapes.

        A loaded layer has its numbers.
        """
        if self.loaded is not None:
            return self
        sent = {name: tensors[sent] for name, sent in self.names.items()}
        weights = self.layout.read(
            KnownTensors(sent, Heads(self.options.heads, self.options.kv_heads))
        )
        return replace(self, tensors={n: tensors[n] for n in self.tensors}, weights=weights)

    def with_spelling(self, tensors: Weights) -> dict[str, Array]:
        """Returns tensors of the layout under the names of the request.

        It leaves out those that the request does not have: a layout writes zeros for some biases.
        """
        return {self.names[n]: array for n, array in tensors.items() if n in self.names}

    def name_of(self, weight: str) -> str:
        """Returns the name in the request of the tensor that has a weight."""
        if self.loaded is not None:
            return f"{self.loaded.name}.{weight}"
        array = self.weights[weight]
        for name, sent in self.tensors.items():
            if np.shares_memory(sent, array):
                return name
        # the weight was copied out of a matrix that has the heads of all roles together
        kind = weight.rpartition(".")[2]
        matrices = [n.removesuffix("weight") for n in self.layout.query_names if n in self.names]
        return next((self.names[m + kind] for m in matrices if m + kind in self.names), weight)

    def projected_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Returns the shapes (B, heads, length, width) of projected embeddings (B, length, M).

        Args:
            shapes: the shapes of the embeddings by role.
            sources: the name of each role's embedding in the request.

        Raises:
            InvalidContent: an embedding does not fit its projection.
        """
        projected: dict[str, tuple[int, ...]] = {}
        for role in ROLES:
            if role not in shapes:
                continue
            B, length, M = shapes[role]
            width, out = self.weights[f"{role}.weight"].shape
            if M != width:
                raise InvalidContent(
                    f"{sources[role]} has the wrong width: got M={M}, expected "
                    f"M={width} as {self.module_of(role)} has",
                    pointer=f"/inputs/{sources[role]}",
                )
            heads = self.head_count(role)
            projected[role] = (B, heads, length, out // heads)
        return projected

    def head_count(self, role: str) -> int:
        """Returns the number of heads of a role's projection; key and value have the same."""
        heads = self.options.heads or 1
        if role == "query":
            return heads
        if self.options.kv_heads is not None:
            return self.options.kv_heads
        return int(self.weights["key.weight"].shape[1]) // self.head_width

    def module_of(self, role: str) -> str:
        """Returns the name in the request of the module that projects to a role."""
        return self.name_of(f"{role}.weight").removesuffix(".weight")

    def error(self, detail: str) -> InvalidContent:
        """Returns an error that points to the tensors of the layer."""
        return InvalidContent(detail, pointer=self.tensors_pointer)

    @property
    def tensors_pointer(self) -> str:
        """JSON pointer to the tensors, or to the name of a loaded layer."""
        return f"{self.pointer}/{'tensors' if self.loaded is None else 'name'}"
