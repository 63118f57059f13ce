"""What is seen of every request, whichever way it takes: an id, counts, and maybe a line of log and
a span of a trace."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.api.fast_path.run_cache import Header, Reply
from qkv.errors import QkvError
from qkv.telemetry.background_writer import Lines
from qkv.telemetry.metrics import OTHER, UNKNOWN, Meter

if TYPE_CHECKING:
    from qkv.telemetry.tracing import Traces

__all__ = [
    "ID",
    "ID_OF",
    "REFUSAL",
    "Observed",
    "Observer",
    "Refusal",
    "fails",
    "request_id",
    "said_id",
]

ID: Final = b"x-request-id"
ID_OF: Final = "qkv.id"
"""Where a scope's `state` has the id of its request, if the connection has said one."""
REFUSAL: Final = "qkv.refusal"
"""Where it has the `Refusal` that the connection answers instead of the application."""
_IS_ID: Final = re.compile(rb"[A-Za-z0-9._:=+/-]{1,128}").fullmatch
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_STAGE: Final = re.compile(rb"(queue|transfer|compute);dur=([0-9.]+)")
_RUN: Final = re.compile(
    r"/v1/(?:attention|gradients)/([^/]*)|/v2/models/([^/]*)(?:/versions/[^/]*)?/infer"
)
_DIGITS: Final = 19  # of a number that 64 bits may not hold, with its sign
_LONGEST_PATH: Final = 512  # characters that a line has of it: lines have a bound
_NAMES: Final = {kind.status: kind.name for kind in QkvError.__subclasses__()}


class Refusal(NamedTuple):
    """What a connection answers by itself.

    Attributes:
        sent: bytes of the answer's body.
    """

    error: QkvError
    sent: int


class _Seen:
    """What is known of a request on its way."""

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.since = time.perf_counter()
        self.status = 0
        self.sent = 0
        self.has_ended = False
        self.headers: Iterable[Header] = ()
        self.problem: str | None = None


_seen: ContextVar[_Seen | None] = ContextVar("qkv.seen", default=None)


def fails(error: QkvError) -> None:
    """Says what becomes of the request that is being answered: a status does not always tell."""
    if (seen := _seen.get()) is not None:
        seen.problem = error.name


def request_id() -> str:
    """The id of the request that is being answered."""
    seen = _seen.get()
    return "?" if seen is None else seen.id.decode()


def said_id(headers: Iterable[Header]) -> bytes | None:
    """The id that a request says it has; None where it says none, or none that may be echoed."""
    return next((value for name, value in headers if name == ID and _IS_ID(value)), None)


class Observer:
    """Ids, counts, log and traces of one process's requests.

    Args:
        meter: counts them.
        log: has a line of each; None: there is none.
        traces: has a span of each; None: there are none.
    """

    def __init__(
        self, meter: Meter, log: Lines | None = None, traces: Traces | None = None
    ) -> None:
        self._meter, self._log, self._traces = meter, log, traces
        self._is_silent = log is None and traces is None
        self._prefix = os.urandom(8).hex().encode()
        self._numbers = itertools.count(1)
        self.received = meter.received

    def new_id(self) -> bytes:
        """An id for a request that says none."""
        return b"%b%08x" % (self._prefix, next(self._numbers))

    def answered_at_once(
        self,
        url: bytes,
        headers: Iterable[Header],
        id: bytes,
        since: float,
        reply: Reply,
        sent: int,
    ) -> None:
        """A shortcut has answered a request that came at `since`, with a body of so many bytes."""
        seconds = time.perf_counter() - since
        self._meter.answered(reply.variant, "ok", seconds, sent)
        if not self._is_silent:
            path = url.partition(b"?")[0].decode("ascii", "replace")
            line = _line(headers, id, "POST", path, reply.variant, 200, "ok", seconds, sent)
            self._tell(line | _stages(reply.lines), headers, seconds, _run_route(path))

    def refused(
        self,
        method: str,
        path: str,
        headers: Iterable[Header],
        id: bytes,
        refusal: Refusal,
    ) -> None:
        """A connection has ended with an error, and answered by itself what is no request, or came
        too slowly."""
        place, (error, sent) = self._place(method, unquote(path)), refusal
        self._meter.answered(place, error.name, 0.0, sent)
        if not self._is_silent:
            name = None if place == OTHER else place
            how = (name, error.status, error.name, None, sent)
            self._tell(_line(headers, id, method, path, *how), headers, 0.0, None)

    def ended(self, scope: Scope, seen: _Seen) -> None:
        """A request has gone the long way, to its end; counts it, once."""
        if seen.has_ended:
            return
        seen.has_ended = True
        seconds = time.perf_counter() - seen.since
        place = self._place(scope["method"], scope["path"])
        outcome = seen.problem
        if (refusal := scope.get("state", {}).get(REFUSAL)) is not None:
            seen.status, outcome, seen.sent = refusal.error.status, refusal.error.name, refusal.sent
        elif outcome is None:
            outcome = "ok" if 200 <= seen.status < 400 else _NAMES.get(seen.status, "internal")
        self._meter.answered(place, outcome, seconds, seen.sent)
        if not self._is_silent:
            name = None if place == OTHER else place
            how = (name, seen.status, outcome, seconds, seen.sent)
            # as it came: what is decoded may hold anything
            path = (scope.get("raw_path") or b"").decode("ascii", "replace")
            line = _line(scope["headers"], seen.id, scope["method"], path, *how)
            timing = next((v for n, v in seen.headers if n == b"server-timing"), b"")
            is_run = place not in (OTHER, UNKNOWN)
            route = (
                _run_route(scope["path"]) if is_run else getattr(scope.get("route"), "path", None)
            )
            self._tell(line | _stages(timing), scope["headers"], seconds, route)

    def _tell(
        self, line: dict[str, Any], headers: Iterable[Header], seconds: float, route: str | None
    ) -> None:
        if self._traces is not None:
            trace = self._traces.add(line, headers, seconds, route)
            line |= {} if trace is None else {"trace_id": trace}
        if self._log is not None:
            self._log.add(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def _place(self, method: str, path: str) -> str:
        """Which variant a request is for, as far as there are such."""
        if method != "POST" or (match := _RUN.fullmatch(path)) is None:
            return OTHER
        name: str = match[1] or match[2] or ""
        return name if self._meter.has(name) else UNKNOWN


class Observed:
    """An application of whose requests nothing goes unseen; pure ASGI."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app, self._observer = app, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = scope.get("state", {}).get(ID_OF)
        seen = _Seen(begun or said_id(scope["headers"]) or self._observer.new_id())
        _seen.set(seen)  # each request has a task, and with it a context, of its own

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status, seen.headers = message["status"], message["headers"]
                message["headers"] = [*seen.headers, (ID, seen.id)]
            elif message["type"] == "http.response.body":
                seen.sent += len(message.get("body", b""))
                if not message.get("more_body", False):
                    # before it goes: whoever has its answer finds it counted, by any worker
                    self._observer.ended(scope, seen)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._observer.ended(scope, seen)  # whose caller left, or which failed


def _line(
    headers: Iterable[Header],
    id: bytes,
    method: str,
    path: str,
    variant: str | None,
    status: int,
    outcome: str,
    seconds: float | None,
    sent: int,
) -> dict[str, Any]:
    said = dict(headers)
    declared = said.get(b"content-length", b"")
    trace = _TRACE.fullmatch(said.get(b"traceparent", b""))
    return {
        "time": datetime.now(UTC),
        "request_id": id.decode(),
        **({} if trace is None else {"trace_id": trace[1].decode()}),
        "method": method,
        "path": path[:_LONGEST_PATH],
        "variant": variant,
        "status": status,
        "outcome": outcome,
        "bytes_in": int(declared) if declared.isdigit() and len(declared) < _DIGITS else None,
        "bytes_out": sent,
        "duration_ms": None if seconds is None else round(seconds * 1e3, 4),
    }


def _run_route(path: str) -> str:
    """The route of a path that runs a variant."""
    return path if path.startswith("/v1/") else "/v2/models/{model}/infer"


def _stages(timing: bytes) -> dict[str, float]:
    """The times of a run, by what its Server-Timing says."""
    return {f"{name.decode()}_ms": float(took) for name, took in _STAGE.findall(timing)}
