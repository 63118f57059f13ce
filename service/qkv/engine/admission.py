"""Admission control: accepts or rejects a request before its body is read, and while it grows.

Counts what is queued and the bodies that are being received. HTTP handlers call
`AdmissionController.admit`.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from qkv.engine.load import Backlog, Load
from qkv.engine.shared_limit import SharedLimit
from qkv.engine.tenant import ANYONE, Tenant
from qkv.errors import QkvError

__all__ = ["Admission", "AdmissionController"]

_MIN_BYTES_PER_S: Final = 1 << 20  # a slower body stops counting after `body_timeout_s`


class AdmissionController:
    """The admission of requests, and the count of bodies being received; for one event loop.

    Args:
        limit: of the load that is queued and received at the same time.
        queued: the load that is queued.

    Attributes:
        admissions: the requests whose bodies are being received.
        body_timeout_s: seconds that a body may take in addition to those for its size. A slower
            body no longer counts against other requests. The server sets its own read timeout.
    """

    def __init__(self, limit: SharedLimit, queued: Backlog) -> None:
        self._limit, self._queued = limit, queued
        self._incoming = Backlog()
        self.admissions: set[Admission] = set()
        self.body_timeout_s = 30.0

    @property
    def incoming(self) -> Load:
        """The load of the bodies being received."""
        return self._incoming.total

    def admit(self, size_bytes: int, tenant: Tenant = ANYONE) -> Admission:
        """Admits a request whose body has this size; release it once the body is read.

        Args:
            size_bytes: of the body, as far as it is known.
            tenant: the sender.

        Raises:
            ServiceUnavailable: too much is queued or being received.
            TooManyRequests: too much of its tenant is, and others send requests too.
        """
        admission = Admission(self, tenant, Load(1, size_bytes))
        self.count(admission)
        return admission

    def count(self, admission: Admission) -> None:
        """Counts an admission that is not counted; errors as for `admit`."""
        if self._incoming or self._queued:
            self._require_room(admission)
        self.admissions.add(admission)
        self._incoming.add(admission.tenant, admission.load)

    def discount(self, admission: Admission) -> None:
        """Stops counting an admission; does nothing if it is not counted."""
        if admission in self.admissions:
            self.admissions.remove(admission)
            self._incoming.remove(admission.tenant, admission.load)

    def _require_room(self, admission: Admission) -> None:
        if self._refusal(admission) is not None:
            self._release_slow_bodies()
            if (error := self._refusal(admission)) is not None:
                raise error

    def _refusal(self, admission: Admission) -> QkvError | None:
        tenant, load = admission.tenant, admission.load
        return self._limit.refusal(tenant, load, self._queued, self._incoming)

    def _release_slow_bodies(self) -> None:
        """Stops counting bodies that arrive too slowly, so that they block other requests only
        briefly. The bodies may still arrive."""
        now = time.perf_counter()
        for admission in list(self.admissions):
            allowed_s = self.body_timeout_s + admission.load.bytes / _MIN_BYTES_PER_S
            if not admission.is_received and now - admission.admitted_at > allowed_s:
                admission.release()


class Admission:
    """One admitted request whose body is being received; a context manager that releases it.

    Args:
        controller: counts it.
        tenant: its sender.
        load: the load that it counts as at first.

    Attributes:
        tenant: as the argument.
        load: the load that it counts as.
        admitted_at: time of admission, by `time.perf_counter`.
        is_received: its body is here, and its work is not done; it counts until then.
    """

    def __init__(self, controller: AdmissionController, tenant: Tenant, load: Load) -> None:
        self._controller, self.tenant, self.load = controller, tenant, load
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

    def release(self) -> None:
        """Stops counting the request; does nothing if it is released already."""
        self._controller.discount(self)

    def grow(self, size_bytes: int) -> None:
        """Adds bytes that `Content-Length` did not declare; the request is admitted anew with them.

        A body that stopped counting because it was slow counts again.

        Raises:
            ServiceUnavailable, TooManyRequests: as for `AdmissionController.admit`.
        """
        self.release()
        self.load = self.load.plus(Load(0, size_bytes))
        self._controller.count(self)
