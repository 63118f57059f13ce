"""Chooses the sequence and the heads of a figure from an array of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Planes", "choose_planes"]


class Planes(NamedTuple):
    """Chosen arrays of the same rank.

    Attributes:
        arrays: (number chosen, ...).
        kind: "head" or "sequence"; "" if there is one array without heads.
        numbers: the index of each array.
        notes: sentences about what is left out.
    """

    arrays: np.ndarray
    kind: str
    numbers: Sequence[int]
    notes: list[str]


def choose_planes(
    array: np.ndarray, rank: int, batch: int | None, heads: Sequence[int] | None, most: int
) -> Planes:
    """Returns the heads of a sequence, or a sequence without heads.

    Args:
        array: with one or two axes before those of a plane, for batch and heads, or with none.
        rank: axes of a plane.
        batch: the sequence; None: the first if there are heads, else all of them.
        heads: the heads; None: all, but at most `most`.
        most: number of planes that are chosen by default.

    Raises:
        ValueError: there is no such sequence or head.
    """
    lead, notes = array.shape[: array.ndim - rank], []
    sequences = lead[0] if lead else 1
    if not 0 <= (batch or 0) < sequences:
        raise ValueError(
            f"batch is out of range: got {batch}, expected 0 to {sequences - 1} (B={sequences})"
        )
    if len(lead) < 2 and heads is not None:
        raise ValueError("heads cannot be chosen: the weights of this run have no heads")
    if len(lead) == 1 and batch is None:
        kind, count, planes = "sequence", sequences, array
    else:
        if sequences > 1:
            notes.append(f"Only sequence {batch or 0} of {sequences:,} is shown.")
        planes = array[batch or 0] if lead else array
        planes = planes.reshape(-1, *array.shape[len(lead) :])
        kind, count = "head" if len(lead) > 1 else "", len(planes)
    numbers = _choose_heads(heads, count) if heads is not None else list(range(min(count, most)))
    if len(numbers) < count:
        notes.append(_left_out(numbers, count, kind, heads is None))
    return Planes(planes[numbers], kind, numbers, notes)


def _choose_heads(heads: Sequence[int], count: int) -> list[int]:
    numbers = [int(head) for head in heads]
    if not numbers:
        raise ValueError("heads is empty: expected at least one head")
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(
                f"heads has a head that does not exist: got {number}, expected 0 to {count - 1} "
                f"(H={count})"
            )
    return numbers


def _left_out(numbers: Sequence[int], count: int, kind: str, are_first: bool) -> str:
    """Returns a sentence about the planes that are not shown."""
    if are_first:
        first = len(numbers)
        which = f"{first} to {count - 1:,}" if first < count - 1 else str(first)
        left = f"{kind.capitalize()}s" if first < count - 1 else kind.capitalize()
        return f"{left} {which} of {count:,} {'are' if first < count - 1 else 'is'} left out."
    left_out = count - len(set(numbers))
    return f"{left_out} of {count:,} {kind}s {'is' if left_out == 1 else 'are'} left out."
