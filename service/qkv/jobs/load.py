"""`Load`: an amount of work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

_UNITS: Final = ("requests", "bytes of tensors", "floating-point operations")

# The work of a job beside its matrix products, as floating-point operations: many tiny jobs, and
# jobs that only move numbers, take time too. Both are estimates: only their magnitude matters.
_FLOPS_PER_JOB: Final = 1 << 20
_FLOPS_PER_BYTE: Final = 4


class Load(NamedTuple):
    """An amount of work: queued, being received, or done.

    Attributes:
        requests: number of requests.
        bytes: bytes of their tensors, in and out.
        flops: floating-point operations of their matrix products.
    """

    requests: int = 0
    bytes: int = 0
    flops: int = 0

    @classmethod
    def sum(cls, loads: Iterable[Load]) -> Load:
        """Returns the sum of any number of loads."""
        total = cls()
        for load in loads:
            total = total.plus(load)
        return total

    @property
    def work(self) -> int:
        """All of it as a number of floating-point operations, an estimate."""
        return self.flops + _FLOPS_PER_BYTE * self.bytes + _FLOPS_PER_JOB * self.requests

    def plus(self, other: Load) -> Load:
        """Returns the sum of both."""
        return Load(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: Load) -> Load:
        """Returns the difference."""
        return Load(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def part(self, fraction: float) -> Load:
        """Returns a fraction of each amount, rounded up."""
        return Load(*[math.ceil(amount * fraction) for amount in self])

    def excess(self, current: Load, added: Load) -> str | None:
        """Returns what `added` on top of `current` has more than this limit: the amount, its unit
        and the limit; None if nothing."""
        for limit, has, adds, unit in zip(self, current, added, _UNITS, strict=True):
            if has + adds > limit:
                return f"{has} {unit} are queued or being received, the limit is {limit}"
        return None
