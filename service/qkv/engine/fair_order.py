"""`FairOrder`: the order in which the jobs of several tenants run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qkv.engine.tenant import Tenant

__all__ = ["FairOrder"]

_PARTS: Final = 1 << 20  # of a unit of work, so that a large weight loses nothing


class FairOrder:
    """The order in which tenants' jobs run, so that work done is in proportion to weights.

    Each tenant has a virtual time: the work of its jobs that have begun, divided by its weight. The
    tenant with the least is next. A tenant without waiting jobs earns nothing: when it brings one,
    its time is at least that of the job that began last. So a tenant waits for at most one job of
    each other tenant, however many these have queued.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2) with one
    counter for each tenant instead of a tag for each job, as in Sheng et al., "Fairness in Serving
    Large Language Models" (OSDI 2024, section 4), so that jobs in a batch of another tenant count
    too.
    """

    def __init__(self) -> None:
        # whole numbers: a float would lose the work of a small job once the times are large
        self._times: dict[Tenant, int] = {}
        self._now = 0

    def join(self, tenant: Tenant) -> None:
        """Adds a tenant that has a job, and had none."""
        self._times[tenant] = max(self._times.get(tenant, 0), self._now)

    def first(self, tenants: Iterable[Tenant]) -> Tenant:
        """Returns the tenant that is next, of at least one; the one that came first if equal."""
        return min(tenants, key=self._times.__getitem__)

    def begin(self, tenant: Tenant) -> None:
        """Sets the time to that of a tenant whose job begins."""
        self._now = max(self._now, self._times[tenant])

    def charge(self, tenant: Tenant, work: int) -> None:
        """Adds the work of a job to its tenant's time."""
        self._times[tenant] += int(work * _PARTS / tenant.weight)
