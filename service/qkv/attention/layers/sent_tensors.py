"""The tensors of a layer as a client sent them, read by the names of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from qkv.attention.layers.layer_weights import Array
from qkv.errors import InvalidContent, pointer_to

Spellings = Mapping[str, tuple[str, ...]]
"""Other names of a layout's modules, by their standard name: {"W_key": ("W_keys",)}."""

_CHANGES_SCORES: Final = {  # parts of names
    "q_norm": "norms of queries",
    "k_norm": "norms of keys",
    "q_layernorm": "norms of queries",
    "k_layernorm": "norms of keys",
    "query_layernorm": "norms of queries",
    "key_layernorm": "norms of keys",
    "sinks": "attention sinks",
    "relative_attention_bias": "relative positions",
    "relative_position_bias_table": "relative positions",
    "distance_embedding": "relative positions",
    "rel_pos_h": "relative positions",
    "rel_pos_w": "relative positions",
    "cpb_mlp": "relative positions",
    "logit_scale": "scales of the scores",
    "q_bias": "biases of queries",
    "k_bias": "biases of keys",
    "v_bias": "biases of values",
}


class Heads(NamedTuple):
    """The numbers of query heads and of key heads; None: not given."""

    query: int | None = None
    key: int | None = None


class SentTensors:
    """The tensors of one layer. Layouts read them; afterwards `ignored` has the others.

    Args:
        tensors: all tensors of the request, by name.
        pointer: JSON pointer to them.
        prefix: of the layer's names, with its last dot.
        spellings: other names of the layout's modules.
        heads: as the request gives them.

    Attributes:
        stems: the spelling in the request of each module that has several.
        used: the name in the request of each tensor that was read, by its standard name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Array],
        pointer: str,
        prefix: str = "",
        spellings: Spellings | None = None,
        heads: Heads = Heads(),  # noqa: B008 (immutable)
    ) -> None:
        self.prefix, self.heads, self._pointer = prefix, heads, pointer
        self.stems: dict[str, str] = {}
        self.used: dict[str, str] = {}
        self._all, self._spellings = tensors, spellings or {}
        self._tensors = {
            name.removeprefix(prefix): array
            for name, array in tensors.items()
            if name.startswith(prefix)
        }
        for stem, others in self._spellings.items():
            sent_stems = [s for s in (stem, *others) if any(_is_in(n, s) for n in self._tensors)]
            if len(sent_stems) > 1:
                raise InvalidContent(
                    f"{stem} appears twice: got {' and '.join(map(repr, sent_stems))}, expected "
                    "one of them",
                    pointer=pointer,
                )
            if sent_stems:
                self.stems[stem] = sent_stems[0]

    def __contains__(self, name: str) -> bool:
        return self._spelled(name) in self._tensors

    def matrix(self, name: str) -> Array:
        """Returns a weight matrix.

        Raises:
            InvalidContent: it is missing, not floating, or has not two axes.
        """
        matrix = self.optional(name, 2)
        if matrix is not None:
            return matrix
        names = ", ".join(map(repr, list(self._tensors)[:12])) or "nothing"
        more = f" and {len(self._tensors) - 12} more" if len(self._tensors) > 12 else ""
        stem = next((s for s in self._spellings if _is_in(name, s)), None)
        stems = [stem, *self._spellings[stem]] if stem is not None else [name]
        end = "" if stem is None else name.removeprefix(stem)
        expected = " or ".join(f"{self.prefix}{s}{end}" for s in stems)
        raise InvalidContent(f"{expected} is missing: got {names}{more}", pointer=self._pointer)

    def vector(self, name: str, size: int | None = None) -> Array | None:
        """Returns a bias or the weight of a norm; None if it is absent.

        Args:
            name: its standard name.
            size: that it must have.

        Raises:
            InvalidContent: it is not floating, or has another shape.
        """
        vector = self.optional(name, 1)
        if vector is not None and size is not None and len(vector) != size:
            raise self.error(name, f"has the wrong size: got {len(vector)}, expected {size}")
        return vector

    def pair(self, name: str) -> tuple[Array, Array | None]:
        """Returns weight (in, out) and bias of an `nn.Linear`, which keeps (out, in).

        Raises:
            InvalidContent: as `matrix` and `vector`.
        """
        weight_OI = self.matrix(f"{name}.weight")
        return weight_OI.T, self.vector(f"{name}.bias", len(weight_OI))

    def optional_pair(self, name: str) -> tuple[Array, Array | None] | None:
        """Returns the same as `pair`; None if there is no weight."""
        return self.pair(name) if f"{name}.weight" in self else None

    def optional(self, name: str, rank: int) -> Array | None:
        """Returns a tensor with `rank` axes; None if it is absent.

        Raises:
            InvalidContent: it is not floating, has another rank, or is empty.
        """
        spelled = self._spelled(name)
        array = self._tensors.get(spelled)
        if array is None:
            return None
        if array.ndim != rank or 0 in array.shape or array.dtype.kind in "bi":
            raise self.error(
                name,
                f"is invalid: got {array.dtype} of shape {list(array.shape)}, expected a floating "
                f"tensor with {rank} ax{'e' if rank > 1 else 'i'}s, none empty",
            )
        if rank == 1 and self.used:  # the matrix that was read last is that of the bias
            matrix = next(reversed(self.used.values()))
            dtype = self._all[matrix].dtype
            if array.dtype != dtype:
                raise self.error(
                    name,
                    f"has the wrong dtype: got {array.dtype.name}, expected {dtype.name} as "
                    f"{matrix} has",
                )
        self.used[name] = self.prefix + spelled
        return array

    def thirds(self, name: str) -> list[Array]:
        """Returns three matrices of equal size that follow each other in the rows of one.

        Raises:
            InvalidContent: as `matrix`, or the rows do not split into three.
        """
        weight_OI = self.matrix(name)
        if len(weight_OI) % 3:
            raise self.error(
                name, f"has the wrong shape: got {list(weight_OI.shape)}, expected (3 out, in)"
            )
        return np.split(weight_OI, 3)

    def error(self, name: str, problem: str) -> InvalidContent:
        """Returns an error that names a tensor as the request does."""
        sent = self.prefix + self._spelled(name)
        return InvalidContent(f"{sent} {problem}", pointer=self._pointer + pointer_to(sent))

    def required_heads(self, reason: str) -> tuple[int, int]:
        """Returns the numbers of query heads and key heads; as many key heads by default.

        Raises:
            InvalidContent: the request has no `heads`.
        """
        if self.heads.query is None:
            raise InvalidContent(
                f"heads is missing: {reason}",
                pointer=f"{self._pointer.removesuffix('/tensors')}/heads",
            )
        return self.heads.query, self.heads.key or self.heads.query

    def finish(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names, as sent, of tensors that belong to no part of the attention.

        Args:
            modules: the standard names of the modules that the layout reads.

        Raises:
            InvalidContent: a tensor belongs to one of these modules and was not read, or changes
                the scores in a way that no layout holds.
        """
        read = set(self.used.values())
        ignored = []
        for name in self._tensors:
            if self.prefix + name in read:
                continue
            for part, what in _CHANGES_SCORES.items():
                if part in name:
                    raise self.error(
                        name, f"is not supported in this layout: {what} change the result"
                    )
            if any(_is_in(name, self._spelled(module)) for module in modules):
                raise self.error(
                    name, "does not belong to this layout, which would leave it out of the result"
                )
            ignored.append(self.prefix + name)
        return tuple(ignored)

    def _spelled(self, name: str) -> str:
        for stem, spelling in self.stems.items():
            if _is_in(name, stem):
                return spelling + name.removeprefix(stem)
        return name


class KnownTensors(SentTensors):
    """The tensors of a layer whose names and shapes were read before; no check runs again.

    Args:
        tensors: by their standard names.
        heads: as the request gives them.
    """

    def __init__(self, tensors: Mapping[str, Array], heads: Heads) -> None:
        self._tensors, self.heads = dict(tensors), heads

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def optional(self, name: str, rank: int) -> Array | None:
        """Returns a tensor; None if it is absent."""
        return self._tensors.get(name)

    def vector(self, name: str, size: int | None = None) -> Array | None:
        """Returns a vector; None if it is absent."""
        return self._tensors.get(name)


def _is_in(name: str, module: str) -> bool:
    """Returns True if a tensor is the module's: its name, or its name and a dot, begin it."""
    return name == module or name.startswith(f"{module}.")
