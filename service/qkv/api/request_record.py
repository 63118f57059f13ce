"""The record of a request: what its middleware, endpoint, metrics and log share.

The outermost middleware makes it that of the task of the request, where `record` finds it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final

from qkv.errors import QkvError
from qkv.jobs.plan import Plan
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.telemetry.times import Times

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""


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
        received_bytes, sent_bytes: of the bodies of request and response.
        error_name: the problem type of its error; None: it has none.
        times: of its run; None until it has run, and for a request that runs nothing.
        variant: that its run had; None as for times.
        layer: the loaded layer of its run; None: it has none.
        is_ended: the metrics and the log have it.
    """

    tenant = ANYONE
    id: bytes | None = None
    status = received_bytes = sent_bytes = 0
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

    @property
    def id_text(self) -> str:
        """The id in a line of the server's log."""
        return "?" if self.id is None else self.id.decode()

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


_current: Final[ContextVar[RequestRecord]] = ContextVar("qkv.request")

record: Final = _current.get
"""Returns the record of the request of this task. Outside of requests it raises a `LookupError`."""


def begin(headers: Sequence[Header]) -> RequestRecord:
    """Returns the record of a request whose task this is; each request has one of its own."""
    request = RequestRecord(headers)
    _current.set(request)
    return request


def record_error(error: QkvError) -> None:
    """Records the error of the request of this task, if it has a record; several errors share a
    status."""
    if (request := _current.get(None)) is not None:
        request.error_name = error.name


def current_tenant() -> Tenant:
    """Returns the sender of the request of this task; anyone outside of requests."""
    request = _current.get(None)
    return ANYONE if request is None else request.tenant


def _join_values(pairs: Sequence[Header]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
    return headers
