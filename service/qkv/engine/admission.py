"""Admission control: accepts or rejects a request before its body is read, and while it grows.

Counts what is queued and the bodies that are being received. HTTP handlers call
`AdmissionController.admit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from qkv.engine.work_queue import Load
from qkv.errors import ServiceUnavailable

__all__ = ["Admission", "AdmissionController"]

_MIN_BYTES_PER_S: Final = 1 << 20  # a slower body stops counting after `body_timeout_s`


class AdmissionController:
    """Admits or rejects requests, and counts the bodies being received; for one event loop.

    Args:
        limit: the most load that may be queued and received at the same time.
        queued: returns the load that is queued now.
        retry_after: estimates the whole seconds until a load is done.

    Attributes:
        incoming: the load of the bodies being received.
        admissions: the requests of these bodies.
        body_timeout_s: seconds that a body may take in addition to those for its size. A slower
            body no longer counts against other requests. The server sets its own read timeout.
    """

    def __init__(
        self, limit: Load, queued: Callable[[], Load], retry_after: Callable[[Load], int]
    ) -> None:
        self._limit, self._queued, self._retry_after = limit, queued, retry_after
        self.incoming = Load()
        self.admissions: set[Admission] = set()
        self.body_timeout_s = 30.0

    def admit(self, size_bytes: int) -> Admission:
        """Admits a request whose body has this size; release it once the body is read.

        Raises:
            ServiceUnavailable: too much is queued or being received.
        """
        admission = Admission(self, Load(1, size_bytes))
        self.count(admission)
        return admission

    def count(self, admission: Admission) -> None:
        """Counts an admission that is not counted.

        Raises:
            ServiceUnavailable: its load does not fit; any load fits while there is no other.
        """
        if self.incoming.requests or self._queued().requests:
            self._require_room(admission.load)
        self.admissions.add(admission)
        self.incoming = self.incoming.plus(admission.load)

    def _require_room(self, added: Load) -> None:
        if self._limit.over_limit(self._total, added) is None:
            return
        self._release_slow_bodies()
        if (why := self._limit.over_limit(self._total, added)) is not None:
            raise ServiceUnavailable(why, retry_after=self._retry_after(self._total))

    @property
    def _total(self) -> Load:
        return self._queued().plus(self.incoming)

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
        load: the load that it counts as at first.

    Attributes:
        load: the load that it counts as.
        admitted_at: time of admission, by `time.perf_counter`.
        is_received: its body is here, and its work is not done; it counts until then.
    """

    def __init__(self, controller: AdmissionController, load: Load) -> None:
        self._controller, self.load, self.admitted_at = controller, load, time.perf_counter()
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
        if self in self._controller.admissions:
            self._controller.admissions.remove(self)
            self._controller.incoming = self._controller.incoming.minus(self.load)

    def grow(self, size_bytes: int) -> None:
        """Adds bytes that `Content-Length` did not declare; the request is admitted anew with them.

        A body that stopped counting because it was slow counts again.

        Raises:
            ServiceUnavailable: too much is queued or being received.
        """
        self.release()
        self.load = self.load.plus(Load(0, size_bytes))
        self._controller.count(self)
