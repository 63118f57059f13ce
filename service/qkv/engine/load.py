"""`Load`: an amount of work; `Backlog`: the load of each tenant that is not done."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from qkv.engine.tenant import Tenant

__all__ = ["Backlog", "Load"]

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


class Backlog:
    """The load of each tenant that is not done.

    One thread at a time may change it; other threads may read it meanwhile.
    """

    def __init__(self) -> None:
        self._loads: dict[Tenant, Load] = {}

    def __bool__(self) -> bool:
        """Returns True if any request is not done."""
        return bool(self._loads)

    def __contains__(self, tenant: Tenant) -> bool:
        """Returns True if a request of the tenant is not done."""
        return tenant in self._loads

    @property
    def loads(self) -> dict[Tenant, Load]:
        """The loads of the tenants that have some: a copy."""
        return self._loads.copy()

    @property
    def total(self) -> Load:
        """The load of all tenants."""
        return Load.sum(self.loads.values())

    def add(self, tenant: Tenant, load: Load) -> None:
        """Adds the load of a request."""
        current = self._loads.get(tenant)
        self._loads[tenant] = load if current is None else current.plus(load)

    def remove(self, tenant: Tenant, load: Load) -> None:
        """Removes the load of a request that was added."""
        current = self._loads[tenant]
        if current.requests > load.requests:
            self._loads[tenant] = current.minus(load)
        else:
            del self._loads[tenant]

    def clear(self) -> None:
        """Removes all."""
        self._loads.clear()
