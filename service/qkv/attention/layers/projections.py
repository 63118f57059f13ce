"""The three projections of an attention layer, in a form that does not depend on the layout."""

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
        name: the name in the request, for instance W_keys.
        weight: (in, out), possibly a transposed view.
        bias: (out), or None.
    """

    name: str
    weight: Array
    bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Projections:
    """The query, key and value projections."""

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
        Per role, the spelling in the request and the tensor of each suffix, None where absent.

    Raises:
        InvalidContent: a tensor is missing or unknown, or the request has both spellings.
    """
    rest = dict(tensors)
    for role in ROLES:
        spellings = [n for n in SPELLINGS[role] if n + suffixes[0] in tensors]
        if len(spellings) != 1:
            expected = " or ".join(n + suffixes[0] for n in SPELLINGS[role])
            names = ", ".join(map(repr, tensors)) or "nothing"
            raise InvalidContent(
                f"the {role} projection is missing or appears twice: got {names}, expected one "
                f"{expected}",
                pointer=pointer,
            )
        yield spellings[0], [rest.pop(spellings[0] + suffix, None) for suffix in suffixes]
    if rest:
        raise InvalidContent(
            f"{', '.join(sorted(map(repr, rest)))} do not belong to this layout", pointer=pointer
        )


def checked(name: str, array: Array, rank: int, pointer: str) -> Array:
    """Returns the array if it is floating, has `rank` axes and is not empty.

    Raises:
        InvalidContent: otherwise.
    """
    if array.ndim != rank or 0 in array.shape or array.dtype.kind in "bi":
        raise InvalidContent(
            f"{name} is invalid: got {array.dtype} of shape {list(array.shape)}, expected a "
            f"floating tensor with {rank} axes, none empty",
            pointer=f"{pointer}/{name}",
        )
    return array
