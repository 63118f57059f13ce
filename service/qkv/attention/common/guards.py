"""Conditions that select the code path of a variant, read at once or together with its outputs.

A variant has an ordinary path, and careful ones for numbers that could overflow or cancel. Usually
`holds` reads a condition at once. On an accelerator each read would wait for the device, and the
path of a batch would depend on all its requests. There a call runs in `deferred`: it takes the
ordinary path and collects the conditions of each item. The executor reads them with the outputs.
It runs the requests for which one is false again: together in a wide call, which computes in
float64, and those for which that is not enough alone, without `deferred`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor

Number = float | Tensor
"""A number of the whole call; in a deferred call a tensor, (B,) or (), in float64."""
Condition = bool | Tensor
"""A condition of the whole call; in a deferred call a bool tensor, (B, ...) or ()."""


class Guards:
    """The conditions of a deferred call.

    Args:
        B: the number of its items.
        is_wide: the call computes in float64 what it otherwise computes in float32.
    """

    def __init__(self, B: int, is_wide: bool) -> None:
        self.items, self.is_wide = slice(0, B), is_wide
        self._conditions: list[tuple[slice, Tensor]] = []
        self._sizes: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def largest_size(self, x: Tensor, shared: bool) -> Tensor:
        """Returns the largest absolute value of each item; computes it once for each tensor.

        The tensor must not change during the call.
        """
        key = id(x), shared
        if (known := self._sizes.get(key)) is None:
            size = torch.linalg.vector_norm(x, torch.inf, _axes(x, shared)).double()
            known = self._sizes[key] = x, size  # with x, its id stays its own
        return known[1]

    def add(self, condition: Tensor) -> None:
        """Adds a condition of the current items."""
        reduced = condition.flatten(1).all(1) if condition.dim() > 1 else condition
        self._conditions.append((self.items, reduced))

    def fitting_items(self, device: torch.device) -> Tensor:
        """Returns True for each item for which all conditions hold, (B,)."""
        fits_B = torch.ones(self.items.stop, dtype=torch.bool, device=device)
        for items, condition in self._conditions:
            fits_B[items].logical_and_(condition)
        return fits_B


_guards: Final[ContextVar[Guards | None]] = ContextVar("guards", default=None)


@contextmanager
def deferred(B: int, is_wide: bool = False) -> Iterator[Guards]:
    """Defers the conditions of a call; arguments as for `Guards`. Yields what collects them."""
    guards = Guards(B, is_wide)
    token = _guards.set(guards)
    try:
        yield guards
    finally:
        _guards.reset(token)


@contextmanager
def of_items(part: slice) -> Iterator[None]:
    """Assigns the conditions in this context to some of the current items.

    Args:
        part: their range; counts from the first of the current items.
    """
    if (guards := _guards.get()) is None:
        yield
        return
    outer, first = guards.items, guards.items.start
    guards.items = slice(first + part.start, first + part.stop)
    try:
        yield
    finally:
        guards.items = outer


def are_deferred() -> bool:
    """Returns True in a deferred call."""
    return _guards.get() is not None


def are_wide() -> bool:
    """Returns True in a deferred call in float64, with numbers below `STACKABLE_BELOW`."""
    return (guards := _guards.get()) is not None and guards.is_wide


def holds(condition: Condition) -> bool:
    """Returns True if a condition is true for all items; always in a deferred call."""
    if isinstance(condition, bool):
        return condition
    if (guards := _guards.get()) is None:
        return bool(condition.all())
    guards.add(condition)
    return True


def occurs(condition: Condition) -> bool:
    """Returns True if a condition is true anywhere; never in a deferred call."""
    if isinstance(condition, bool):
        return condition
    if (guards := _guards.get()) is None:
        return bool(condition.any())
    guards.add(~condition)
    return False


def items_within(number_B: Tensor, least: float, largest: float) -> list[bool]:
    """Returns True for each item whose number is in a range; for all items in a deferred call."""
    if (guards := _guards.get()) is None:
        return [least <= number <= largest for number in number_B.tolist()]
    guards.add((number_B >= least) & (number_B <= largest))
    return [True] * len(number_B)


def bounds(x: Tensor, shared: bool = False) -> tuple[Number, Number]:
    """Returns the lowest and the highest number; NaN if x has NaN.

    Args:
        x: (B, ...).
        shared: x has no axis B.
    """
    if not are_deferred():
        low, high = torch.aminmax(x)
        return low.item(), high.item()
    axes = _axes(x, shared)
    return x.amin(axes).double(), x.amax(axes).double()


def largest_size(x: Tensor, shared: bool = False) -> Number:
    """Returns the largest absolute value; arguments and NaN as for `bounds`."""
    if (guards := _guards.get()) is None:
        low, high = torch.aminmax(x)
        return max(-low.item(), high.item())
    return guards.largest_size(x, shared)


def is_finite(x: Tensor, dtype: torch.dtype | None = None, shared: bool = False) -> Condition:
    """Returns True if the sum of x is finite: then x has neither infinity nor NaN.

    Args:
        x: (B, ...).
        dtype: of the sum; None: that of x.
        shared: x has no axis B.
    """
    if not are_deferred():
        return math.isfinite(x.sum(dtype=dtype).item())
    return x.sum(_axes(x, shared), dtype=dtype).isfinite()


def _axes(x: Tensor, shared: bool) -> tuple[int, ...]:
    """Returns the axes of x within an item."""
    return tuple(range(0 if shared else 1, x.dim()))
