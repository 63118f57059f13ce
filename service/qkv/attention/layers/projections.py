"""The three projections of an attention layer, whatever layout they came in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qkv.errors import InvalidContent

__all__ = ["ROLES", "SPELLINGS", "Projection", "Projections", "take"]

ROLES: Final = ("query", "key", "value")

SPELLINGS: Final = {
    "query": ("W_query",),
    "key": ("W_key", "W_keys"),
    "value": ("W_value", "W_values"),
}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection, x @ weight + bias.

    Attributes:
        name: as it was spelled, for instance W_keys.
        weight: (in, out), possibly a transposed view.
        bias: (out), or None.
    """

    name: str
    weight: Array
    bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Projections:
    """Query, key and value projection."""

    query: Projection
    key: Projection
    value: Projection

    def __iter__(self) -> Iterator[Projection]:
        return iter((self.query, self.key, self.value))


def take(
    tensors: Mapping[str, Array], suffixes: tuple[str, ...], pointer: str
) -> Iterator[tuple[str, list[Array | None]]]:
    """Finds each role's tensors under either spelling; the first suffix is required.

    Yields:
        Per role, the name as spelled and the tensors of each suffix, None where absent.

    Raises:
        InvalidContent: a tensor is missing, unknown, spelled twice, or of the wrong rank.
    """
    left = dict(tensors)
    for role in ROLES:
        spelled = [n for n in SPELLINGS[role] if n + suffixes[0] in tensors]
        if len(spelled) != 1:
            wanted = " or ".join(n + suffixes[0] for n in SPELLINGS[role])
            came = ", ".join(map(repr, tensors)) or "nothing"
            raise InvalidContent(
                f"the {role} projection must come once, as {wanted}; {came} came", pointer=pointer
            )
        yield spelled[0], [left.pop(spelled[0] + suffix, None) for suffix in suffixes]
    if left:
        raise InvalidContent(
            f"{', '.join(sorted(map(repr, left)))} do not belong to this layout", pointer=pointer
        )


def checked(name: str, array: Array, rank: int, pointer: str) -> Array:
    """The array, if it is floating and of that rank.

    Raises:
        InvalidContent: it is not.
    """
    if array.ndim != rank or 0 in array.shape or array.dtype.kind in "bi":
        raise InvalidContent(
            f"{name} must be a floating tensor with {rank} axes, none empty; {array.dtype} of "
            f"shape {list(array.shape)} came",
            pointer=f"{pointer}/{name}",
        )
    return array
