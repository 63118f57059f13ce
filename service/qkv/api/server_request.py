"""A request in progress: what its server tells the application beside the scope, and its record.

`server_request` returns it. The one key of a scope that qkv adds refers to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from starlette.types import Scope

from qkv.engine.tenant import ANYONE
from qkv.errors import QkvError
from qkv.telemetry.times import Times

__all__ = [
    "SERVER_REQUEST",
    "Header",
    "ProtocolError",
    "ServerRequest",
    "headers_of",
    "server_request",
]

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""

SERVER_REQUEST: Final = "qkv.server_request"
"""Key of a scope: its `ServerRequest`."""


class ProtocolError(NamedTuple):
    """An error whose response the connection has sent.

    Attributes:
        error: the error.
        sent_bytes: bytes of the response's body.
    """

    error: QkvError
    sent_bytes: int


class ServerRequest:
    """A request in progress. This class is for a server that tells nothing of its own.

    Args:
        headers: names in lower case, and values.

    Attributes:
        headers: the headers by their names. The values of a name that comes more than once are
            joined (RFC 9110, section 5.3). Starlette's headers search the list for each name, which
            takes as long as a small attention in all.
        tenant: its sender, by the API key.
        id: the id of the request; None until it is chosen.
        disconnected: the client has disconnected, or its request failed.
        protocol_error: the error that the connection has sent as the response.
        received_at: time of its head, by `time.perf_counter`.
        status: of the response; 0 until it begins.
        sent_bytes: bytes of the response's body.
        error_name: the problem type of its error; None: it has none.
        times: of its run; None until it has run, and for a request that runs nothing.
        variant: that its run had; None as for times.
        layer: the loaded layer of its run; None: it has none.
        is_recorded: the metrics and the log have it.
    """

    def __init__(self, headers: Sequence[Header]) -> None:
        self.headers: Mapping[bytes, bytes] = dict(headers)
        if len(self.headers) < len(headers):
            self.headers = _join_values(headers)
        self.tenant = ANYONE
        self.id: bytes | None = None
        self.disconnected = False
        self.protocol_error: ProtocolError | None = None
        self._on_disconnect: Callable[[], object] | None = None
        self.received_at = time.perf_counter()
        self.status = self.sent_bytes = 0
        self.error_name: str | None = None
        self.times: Times | None = None
        self.variant: str | None = None
        self.layer: str | None = None
        self.is_recorded = False

    @property
    def is_alone(self) -> bool:
        """True if no other request of this process is in progress, as far as the server knows."""
        return True

    async def peek(self, _size: int) -> bytes | None:
        """Waits for the first bytes of the body, and returns them without reading them.

        Fewer than `size` bytes are all of the body, or those before a disconnect. None: the server
        cannot fill a buffer.
        """
        return None

    async def read_into(self, _buffer: memoryview) -> bool:
        """Fills a buffer that is as long as the body, without a copy in between where possible.

        Returns:
            False if the client has disconnected.
        """
        raise NotImplementedError

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Sets what the server calls when the client disconnects; None: it calls nothing."""
        self._on_disconnect = callback
        if callback is not None and self.disconnected:
            callback()

    def disconnect(self) -> None:
        """Tells the application that its client is gone."""
        self.disconnected = True
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()


def server_request(scope: Scope) -> ServerRequest:
    """Returns the request of a scope, as its server sees it."""
    request: ServerRequest | None = scope.get(SERVER_REQUEST)
    if request is None:
        request = scope[SERVER_REQUEST] = ServerRequest(scope["headers"])
    return request


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Returns the headers of a request by their names in lower case."""
    return server_request(scope).headers


def _join_values(pairs: Iterable[Header]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
    return headers
