"""The record of a request: what its middleware, endpoint, metrics and log share.

The outermost middleware puts it into the scope, and `record_of` returns it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Scope

from qkv.jobs.tenant import ANYONE
from qkv.telemetry.times import Times

__all__ = ["Header", "RequestRecord", "headers_of", "record_of"]

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

    def __init__(self, headers: Sequence[Header]) -> None:
        self.headers: Mapping[bytes, bytes] = dict(headers)
        if len(self.headers) < len(headers):
            self.headers = _join_values(headers)
        self.tenant = ANYONE
        self.id: bytes | None = None
        self.received_at = time.perf_counter()
        self.status = self.sent_bytes = 0
        self.error_name: str | None = None
        self.times: Times | None = None
        self.variant: str | None = None
        self.layer: str | None = None
        self.is_ended = False


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of a request."""
    record: RequestRecord | None = scope.get(_KEY)
    if record is None:
        record = scope[_KEY] = RequestRecord(scope["headers"])
    return record


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Returns the headers of a request by their names in lower case."""
    return record_of(scope).headers


def _join_values(pairs: Sequence[Header]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
    return headers
