"""Admission: what the requests of a process hold of its limit, by tenant.

HTTP handlers call `Admission.admit` before they read a body. Lanes hold what their jobs need until
these leave them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from qkv.engine.throughput import Throughput
from qkv.errors import QkvError, ServiceUnavailable, TooManyRequests
from qkv.jobs.job import Job
from qkv.jobs.load import Load
from qkv.jobs.tenant import ANYONE, Tenant

EXCESS: Final = 2
"""The largest load of several tenants, as a multiple of the limit of one alone."""

_COMPETING_S: Final = 5.0  # that a tenant keeps its share after its last request
_MIN_BYTES_PER_S: Final = 1 << 20  # a slower body stops counting after `body_timeout_s`


class Holdings(dict[Tenant, Load]):
    """The load that each tenant holds.

    One thread at a time may change it; other threads may read it meanwhile.
    """

    @property
    def total(self) -> Load:
        """The load of all tenants."""
        return Load.sum(self.copy().values())

    def take(self, tenant: Tenant, load: Load) -> None:
        """Adds the load of a request."""
        current = self.get(tenant)
        self[tenant] = load if current is None else current.plus(load)

    def give_back(self, tenant: Tenant, load: Load) -> None:
        """Removes the load of a request that was added."""
        current = self[tenant]
        if current.requests > load.requests:
            self[tenant] = current.minus(load)
        else:
            del self[tenant]


class Admission:
    """The load that bodies being received and waiting jobs hold of the limit of a process.

    A tenant alone may use all of the limit. Tenants that compete have shares of it by their
    weights, and a tenant within its share may exceed the limit while the flood of one that came
    before is being done. Nothing exceeds it more than `EXCESS` times.

    Args:
        limit: the largest load of a tenant that is alone.

    Attributes:
        limit: as the argument.
        jobs: what jobs hold. One thread at a time may change it.
        bodies: what bodies hold; for the event loop.
        admitted: the requests whose bodies hold it.
        throughput: an estimate from the batches that ran; the engine adds them.
        on_change: called with the load of the jobs when it changes.
        body_timeout_s: seconds that a body may take in addition to those for its size. A slower
            body no longer counts against other requests. The server sets its own read timeout.
    """

    def __init__(self, limit: Load) -> None:
        self.limit = limit
        self.jobs, self.bodies = Holdings(), Holdings()
        self.admitted: set[AdmittedBody] = set()
        self.throughput = Throughput()
        self.on_change: Callable[[Load], None] = lambda _: None
        self.body_timeout_s = 30.0
        self._seen_at: dict[Tenant, float] = {}  # last request beside others, by time.monotonic

    def admit(self, size_bytes: int, tenant: Tenant = ANYONE) -> AdmittedBody:
        """Admits a request whose body has this size; release it once the body is read.

        Args:
            size_bytes: of the body, as far as it is known.
            tenant: the sender.

        Raises:
            ServiceUnavailable: too much is held.
            TooManyRequests: too much is held by its tenant, and others send requests too.
        """
        body = AdmittedBody(self, tenant, Load(1, size_bytes))
        body.take()
        return body

    def take(self, job: Job) -> None:
        """Holds the load of a job that waits."""
        self.jobs.take(job.tenant, job.plan.load)
        self.on_change(self.jobs.total)

    def give_back(self, job: Job) -> None:
        """Gives back what a job holds."""
        self.jobs.give_back(job.tenant, job.plan.load)
        self.on_change(self.jobs.total)

    def require_room(self, body: AdmittedBody) -> None:
        """Checks that a body fits beside all bodies and jobs; errors as for `admit`."""
        if self.refusal(body.tenant, body.load, self.jobs, self.bodies) is not None:
            self._release_slow_bodies()
            error = self.refusal(body.tenant, body.load, self.jobs, self.bodies)
            if error is not None:
                raise error

    def refusal(self, tenant: Tenant, added: Load, *holdings: Holdings) -> QkvError | None:
        """Returns the error of a request that does not fit; None: it fits.

        A request of any size fits while there is no other.

        Args:
            tenant: its sender.
            added: its load.
            *holdings: all load beside it; none: that of the jobs.
        """
        loads = _by_tenant(holdings or (self.jobs,))
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
            retry_after=self.throughput.retry_after(load.part(1 / fraction)),
        )

    def _full(self, limit: Load, total: Load, added: Load) -> ServiceUnavailable | None:
        """Returns the error of a request beyond the limit of all tenants."""
        if (excess := limit.excess(total, added)) is None:
            return None
        retry_after = self.throughput.retry_after(total)
        return ServiceUnavailable(f"the queue is full: {excess}", retry_after=retry_after)

    def _others(self, tenant: Tenant, loads: dict[Tenant, Load]) -> set[Tenant]:
        """Returns the other tenants that have load, or sent a request just now."""
        now = time.monotonic()
        self._seen_at[tenant] = now
        self._seen_at = {t: at for t, at in self._seen_at.items() if now - at < _COMPETING_S}
        return {*loads, *self._seen_at} - {tenant}

    def _release_slow_bodies(self) -> None:
        """Stops counting bodies that arrive too slowly, so that they block other requests only
        briefly. The bodies may still arrive."""
        now = time.perf_counter()
        for body in list(self.admitted):
            allowed_s = self.body_timeout_s + body.load.bytes / _MIN_BYTES_PER_S
            if not body.is_received and now - body.admitted_at > allowed_s:
                body.release()


class AdmittedBody:
    """One admitted request whose body is being received; a context manager that releases it.

    Args:
        admission: counts it.
        tenant: its sender.
        load: the load that it counts as at first.

    Attributes:
        tenant: as the argument.
        load: the load that it counts as.
        admitted_at: time of admission, by `time.perf_counter`.
        is_received: its body is here, and its work is not done; it counts until then.
    """

    __slots__ = ("_admission", "admitted_at", "is_received", "load", "tenant")

    def __init__(self, admission: Admission, tenant: Tenant, load: Load) -> None:
        self._admission, self.tenant, self.load = admission, tenant, load
        self.admitted_at = time.perf_counter()
        self.is_received = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def take(self) -> None:
        """Holds its load; errors as for `Admission.admit`."""
        admission = self._admission
        if admission.bodies or admission.jobs:
            admission.require_room(self)
        admission.admitted.add(self)
        admission.bodies.take(self.tenant, self.load)

    def release(self) -> None:
        """Gives its load back; does nothing if it holds none."""
        admission = self._admission
        if self in admission.admitted:
            admission.admitted.remove(self)
            admission.bodies.give_back(self.tenant, self.load)

    def grow(self, size_bytes: int) -> None:
        """Adds bytes that `Content-Length` did not declare; the request is admitted anew with them.

        A body that stopped counting because it was slow counts again.

        Raises:
            ServiceUnavailable, TooManyRequests: as for `Admission.admit`.
        """
        self.release()
        self.load = self.load.plus(Load(0, size_bytes))
        self.take()


def _by_tenant(holdings: tuple[Holdings, ...]) -> dict[Tenant, Load]:
    loads: dict[Tenant, Load] = {}
    for each in holdings:
        for tenant, load in each.copy().items():  # another thread may change it meanwhile
            loads[tenant] = loads[tenant].plus(load) if tenant in loads else load
    return loads
