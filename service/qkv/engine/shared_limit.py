"""`SharedLimit`: the largest load at a time, and each tenant's share while several compete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from qkv.engine.load import Backlog, Load
from qkv.engine.tenant import Tenant
from qkv.errors import QkvError, ServiceUnavailable, TooManyRequests

__all__ = ["EXCESS", "SharedLimit"]

EXCESS: Final = 2
"""The largest load of several tenants, as a multiple of the limit of one alone."""
_COMPETING_S: Final = 5.0  # that a tenant keeps its share after its last request


class SharedLimit:
    """The limit of the load that is queued or being received.

    A tenant alone may use all of the limit. Tenants that compete have shares of it by their
    weights, and a tenant within its share may exceed the limit while the flood of one that came
    before is being done. Nothing exceeds it more than `EXCESS` times.

    Args:
        limit: the largest load of a tenant that is alone.
        retry_after: estimates the whole seconds until a load is done.
    """

    def __init__(self, limit: Load, retry_after: Callable[[Load], int]) -> None:
        self.limit = limit
        self._retry_after = retry_after
        self._seen_at: dict[Tenant, float] = {}  # last request beside others, by time.monotonic

    def refusal(self, tenant: Tenant, added: Load, *backlogs: Backlog) -> QkvError | None:
        """Returns the error of a request that does not fit; None: it fits.

        A request of any size fits while there is no other.

        Args:
            tenant: its sender.
            added: its load.
            *backlogs: all load that is not done.
        """
        loads = _by_tenant(backlogs)
        if not loads:
            return None
        total = Load.sum(loads.values())
        others = self._others(tenant, loads)
        load = loads.get(tenant, Load())
        if not others:
            return self._full(self.limit, total, added)
        fraction = tenant.weight / (tenant.weight + sum([each.weight for each in others]))
        excess_of_share = self.limit.part(fraction).excess(load, added)
        if excess_of_share is None:
            return self._full(self.limit.part(EXCESS), total, added)
        if not load.requests and self._full(self.limit, total, added) is None:
            return None  # a request that is larger than the share, and has room
        return TooManyRequests(
            f"the key {tenant.name} has its share of the queue, which others use too: "
            f"{excess_of_share}",
            retry_after=self._retry_after(load.part(1 / fraction)),
        )

    def _full(self, limit: Load, total: Load, added: Load) -> ServiceUnavailable | None:
        """Returns the error of a request beyond the limit of all tenants."""
        if (excess := limit.excess(total, added)) is None:
            return None
        retry_after = self._retry_after(total)
        return ServiceUnavailable(f"the queue is full: {excess}", retry_after=retry_after)

    def _others(self, tenant: Tenant, loads: dict[Tenant, Load]) -> set[Tenant]:
        """Returns the other tenants that have load, or sent a request just now."""
        now = time.monotonic()
        self._seen_at[tenant] = now
        self._seen_at = {t: at for t, at in self._seen_at.items() if now - at < _COMPETING_S}
        return {*loads, *self._seen_at} - {tenant}


def _by_tenant(backlogs: Sequence[Backlog]) -> dict[Tenant, Load]:
    loads: dict[Tenant, Load] = {}
    for backlog in backlogs:
        for tenant, load in backlog.loads.items():
            loads[tenant] = loads[tenant].plus(load) if tenant in loads else load
    return loads
