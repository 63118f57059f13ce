"""A state as plain float64 numpy, for the references of variants whose queries share sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["HeadState"]


class HeadState(NamedTuple):
    """The state of one head.

    Attributes:
        sums_FW: over the tokens before the tail; the last column sums the weights.
        largest_F: what the logarithms of the features in these sums were reduced by.
        key_CD, value_CE: the tokens of the tail.
    """

    sums_FW: np.ndarray
    largest_F: np.ndarray
    key_CD: np.ndarray
    value_CE: np.ndarray

    @classmethod
    def of(cls, past: Any | None, place: tuple[int, int], F: int, D: int, E: int) -> HeadState:
        """Returns the state of an item and a key head; zeros and an empty tail without one."""
        sums, largest = np.zeros((F, E + 1)), np.zeros(F)
        key, value = np.zeros((0, D)), np.zeros((0, E))
        if past is not None and past.sums is not None:
            sums = past.sums[place].double().numpy()
            if getattr(past, "largest", None) is not None:
                largest = past.largest[place].double().numpy()
        if past is not None and past.tail_length is not None:
            length = int(past.tail_length[place[0]])
            value = past.tail_value[place][:length].double().numpy()
            if D:
                key = past.tail_key[place][:length].double().numpy()
        return cls(sums, largest, key, value)
