"""The record of a request: what its middleware, endpoint, metrics and log share.

The outermost middleware puts it into the scope, where `record_of` finds it, and makes it that of
its task for functions that have no scope.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final

from starlette.types import Scope

from qkv.errors import QkvError
from qkv.jobs.plan import Plan
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.telemetry.times import Times

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""

_KEY: Final = "qkv.record"


class RequestRecord:
    """The record of a request in progress.

    Args:
        headers: names in lower case, and values.

    Attributes:
        headers: the headers by their names. The values of a name that comes more than once are
            joined (RFC 9110, section 5.3). Starlette's headers search the list for each name, which
            takes as long as a small attention in all.
        tenant: its sender, by the API key.
        id: the id of the request; None until it is chosen.
        received_at: time of its head, by `time.perf_counter`.
        status: of the response; 0 until it begins.
        sent_bytes: bytes of the response's body.
        error_name: the problem type of its error; None: it has none.
        times: of its run; None until it has run, and for a request that runs nothing.
        variant: that its run had; None as for times.
        layer: the loaded layer of its run; None: it has none.
        is_ended: the metrics and the log have it.
    """

    tenant = ANYONE
    id: bytes | None = None
    status = sent_bytes = 0
    error_name: str | None = None
    times: Times | None = None
    variant: str | None = None
    layer: str | None = None
    is_ended = False

    def __init__(self, headers: Sequence[Header]) -> None:
        self.received_at = time.perf_counter()
        self.headers: Mapping[bytes, bytes] = dict(headers)
        if len(self.headers) < len(headers):
            self.headers = _join_values(headers)

    def add_run(self, times: Times, plan: Plan | None = None) -> None:
        """Records the times of a run, for the metrics, the log and the span.

        It must not refer to outputs: tasks and timers that the request starts keep its context.

        Args:
            times: of the run.
            plan: of the run; None: the request is a comparison, with several runs.
        """
        self.times = times
        if plan is not None:
            self.variant, self.layer = plan.variant.name, plan.layer_name


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of a request."""
    try:
        record: RequestRecord = scope[_KEY]
    except KeyError:
        record = scope[_KEY] = RequestRecord(scope["headers"])
    return record


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Returns the headers of a request by their names in lower case."""
    return record_of(scope).headers


current: ContextVar[RequestRecord | None] = ContextVar("qkv.request", default=None)
"""The record of the request of this task; None outside of requests."""


def record_error(error: QkvError) -> None:
    """Records the error of the current request; several errors share a status."""
    if (request := current.get()) is not None:
        request.error_name = error.name


def has_responded() -> bool:
    """Returns True if the response to the current request has begun."""
    request = current.get()
    return request is not None and request.status != 0


def current_tenant() -> Tenant:
    """Returns the sender of the current request."""
    request = current.get()
    return ANYONE if request is None else request.tenant


def request_id() -> str:
    """Returns the id of the current request."""
    request = current.get()
    return "?" if request is None or request.id is None else request.id.decode()


def _join_values(pairs: Sequence[Header]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
    return headers
