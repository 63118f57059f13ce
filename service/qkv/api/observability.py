"""Observability of every request: an id, metrics, and optionally a log line and a span."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.api.endpoints.open_inference_repository import LAYER_VARIANT
from qkv.api.error_responses import error_response
from qkv.api.request_record import RequestRecord, begin
from qkv.api.request_source import SourceRules
from qkv.errors import PROTOCOL_ERROR, QkvError, TooManyRequests
from qkv.jobs.tenant import Tenant
from qkv.telemetry.counters import Recorder
from qkv.telemetry.families import OTHER, UNKNOWN
from qkv.telemetry.log_writer import BackgroundWriter
from qkv.telemetry.times import Times
from qkv.telemetry.trace_context import remote_trace_id

if TYPE_CHECKING:
    from qkv.telemetry.tracing import Traces

REQUEST_ID_HEADER: Final = b"x-request-id"
_MATCH_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:=+/-]{1,128}").fullmatch
_RUN_PATH: Final = re.compile(
    r"/v1/(?:attention|gradients)/([^/]*)|/v2/models/([^/]*)(?:/versions/[^/]*)?/infer"
)
_RUN_PATHS: Final = ("/v1/attention/%s", "/v1/gradients/%s", "/v2/models/%s/infer")
_MAX_DIGITS: Final = 19  # digits of an int64
_MAX_PATH_LENGTH: Final = 512  # in a log line
_ERROR_NAMES: Final = {kind.status: kind.name for kind in QkvError.__subclasses__()}


class RequestObserver:
    """The observer of one process: counts, logs and traces requests, and gives them ids.

    Args:
        recorder: counts the requests.
        log: gets a line for each request; None: no log.
        traces: gets a span for each request; None: no traces.
    """

    def __init__(
        self,
        recorder: Recorder,
        log: BackgroundWriter | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._recorder, self._log, self._traces = recorder, log, traces
        self._labels: dict[str, str] = {
            path % name: name for path in _RUN_PATHS for name in recorder.variants
        }
        if LAYER_VARIANT in recorder.variants:
            *_, infer = _RUN_PATHS
            self._labels |= {infer % name: LAYER_VARIANT for name in recorder.layers}
        self._is_silent = log is None and traces is None
        self._prefix = os.urandom(8).hex().encode()
        self._numbers = itertools.count(1)

    def id_of(self, request: RequestRecord) -> bytes:
        """Returns the id of a request: its client's, or a new one if that is malformed."""
        if request.id is None:
            given = request.headers.get(REQUEST_ID_HEADER)
            if given is not None and _MATCH_REQUEST_ID(given):
                request.id = given
            else:
                request.id = b"%b%08x" % (self._prefix, next(self._numbers))
        return request.id

    def record_end(self, scope: Scope, request: RequestRecord) -> None:
        """Records a request that ASGI handled. Does nothing the second time."""
        if request.is_ended:
            return
        request.is_ended = True
        seconds = time.perf_counter() - request.received_at
        label = request.variant or self._variant_label(scope["method"], scope["path"])
        outcome = request.error_name
        if outcome is None:
            is_ok = 200 <= request.status < 400
            outcome = "ok" if is_ok else _ERROR_NAMES.get(request.status, "internal")
        sizes = request.received_bytes, request.sent_bytes
        self._recorder.record_response(label, outcome, seconds, sizes, request.times)
        if key := request.tenant.name:
            compute_s = 0.0 if request.times is None else request.times.own_compute_s
            is_rejected = outcome == TooManyRequests.name
            self._recorder.record_key(key, is_rejected=is_rejected, compute_s=compute_s)
        if request.layer is not None and request.times is not None:
            self._recorder.record_layer(request.layer, request.times)
        if not self._is_silent:
            name = None if label == OTHER else label
            details = (name, request.status, outcome, seconds, request.sent_bytes)
            # the decoded path may contain any character
            path = (scope.get("raw_path") or b"").decode("ascii", "replace")
            line = _new_line(request.headers, self.id_of(request), scope["method"], path, *details)
            is_run = label not in (OTHER, UNKNOWN)
            route = (
                _run_route(scope["path"]) if is_run else getattr(scope.get("route"), "path", None)
            )
            line |= _key(request.tenant) | _stages(request.times)
            self._log_and_trace(line, request, seconds, route)

    def _log_and_trace(
        self, line: dict[str, Any], request: RequestRecord, seconds: float, route: str | None
    ) -> None:
        if self._traces is not None:
            trace = self._traces.add(line, request.headers, seconds, route)
            line |= {} if trace is None else {"trace_id": trace}
        if self._log is not None:
            self._log.add(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def _variant_label(self, method: str, path: str) -> str:
        """Returns the variant of a request as a label of the metrics."""
        if method == "POST" and (label := self._labels.get(path)) is not None:
            return label
        if method != "POST" or (match := _RUN_PATH.fullmatch(path)) is None:
            return OTHER
        name: str = match[1] or match[2] or ""
        return name if name in self._recorder.variants else UNKNOWN


class ObservabilityMiddleware:
    """A middleware that observes all requests of an application.

    It answers those that the server could not read, and those that their source forbids, before
    their body is read, so that they are recorded as the others are.

    Args:
        app: the application.
        observer: records the requests.
        rules: decide which sources are refused.
    """

    def __init__(self, app: ASGIApp, observer: RequestObserver, rules: SourceRules) -> None:
        self._app, self._observer, self._rules = app, observer, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = begin(scope["headers"])
        id = self._observer.id_of(request)

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER, id)]
            elif message["type"] == "http.response.body":
                request.sent_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    # before the send: a client with its response sees it in /metrics of any worker
                    self._observer.record_end(scope, request)
            await send(message)

        app, error = self._app, scope.get(PROTOCOL_ERROR)
        if error is None:
            error = self._rules.find_error(scope, request.headers)
        if error is not None:
            app = error_response(error, scope["path"])
        try:
            await app(scope, receive, send_observed)
        finally:
            # if the client disconnected, or the application failed
            self._observer.record_end(scope, request)


def _new_line(
    headers: Mapping[bytes, bytes],
    id: bytes,
    method: str,
    path: str,
    variant: str | None,
    status: int,
    outcome: str,
    seconds: float | None,
    sent_bytes: int,
) -> dict[str, Any]:
    declared = headers.get(b"content-length", b"")
    trace_id = remote_trace_id(headers)
    return {
        "time": datetime.now(UTC),
        "request_id": id.decode(),
        **({} if trace_id is None else {"trace_id": trace_id}),
        "method": method,
        "path": path[:_MAX_PATH_LENGTH],
        "variant": variant,
        "status": status,
        "outcome": outcome,
        "bytes_in": int(declared) if declared.isdigit() and len(declared) < _MAX_DIGITS else None,
        "bytes_out": sent_bytes,
        "duration_ms": None if seconds is None else round(seconds * 1e3, 4),
    }


def _run_route(path: str) -> str:
    """Returns the route of a path that runs a variant."""
    return path if path.startswith("/v1/") else "/v2/models/{model}/infer"


def _key(tenant: Tenant) -> dict[str, str]:
    """Returns the name of the API key; nothing for a request without one."""
    return {"key": tenant.name} if tenant.name else {}


def _stages(times: Times | None) -> dict[str, float]:
    """Returns the times of a run in milliseconds; none for a request without a run."""
    if times is None:
        return {}
    stages = {"queue_ms": times.queue_s, "transfer_ms": times.transfer_s}
    stages["compute_ms"] = times.compute_s
    return {name: round(seconds * 1e3, 4) for name, seconds in stages.items()}
