"""Traces: a span of each request, sent to a collector with OpenTelemetry's protocol (OTLP).

Names follow OpenTelemetry's conventions for HTTP servers. Import it only if traces are enabled: it
needs the extra `tracing`, and its import is slow. Entry point: `Traces`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from qkv.telemetry.trace_context import remote_context
from qkv.version import __version__

_STOP_TIMEOUT_S: Final = 5.0  # to send the remaining spans when the service stops
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
_OTHER: Final = "_OTHER"
_MAX_ATTRIBUTE_LENGTH: Final = 512  # characters of a client's text in a span
_NAMES: Final = {  # attribute of a span by field of the request log
    "status": "http.response.status_code",
    "path": "url.path",
    "bytes_in": "http.request.body.size",
    "bytes_out": "http.response.body.size",
    "request_id": "qkv.request_id",
    "variant": "qkv.variant",
    "outcome": "qkv.outcome",
    "key": "user.name",
    "queue_ms": "qkv.queue_ms",
    "transfer_ms": "qkv.transfer_ms",
    "compute_ms": "qkv.compute_ms",
}


class Traces:
    """The traces of one process. OpenTelemetry's environment variables (OTEL_*) set the
    destination, the sampling and the interval."""

    def __init__(self) -> None:
        named = Resource({"service.name": "qkv", "service.version": __version__})
        named = named.merge(
            OTELResourceDetector().detect()
        )  # the operator's values take precedence
        self._provider = TracerProvider(
            resource=Resource.create(dict(named.attributes)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("qkv", __version__)

    def add(
        self,
        log_entry: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        seconds: float,
        route: str | None,
    ) -> str | None:
        """Queues the span of a request that ends now; a background thread sends it.

        Args:
            log_entry: entry of the request in the request log.
            headers: headers of the request by name, in lower case.
            seconds: duration of the request.
            route: path template of the route; None if no route matches.

        Returns:
            The trace id; None if the trace is not sampled.
        """
        now = time.time_ns()
        method = log_entry["method"] if log_entry["method"] in _METHODS else _OTHER
        name = "HTTP" if method == _OTHER else method
        span = self._tracer.start_span(
            name if route is None else f"{name} {route}",
            context=remote_context(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(log_entry, headers, method, route),
            start_time=now - int(seconds * 1e9),
        )
        if not span.is_recording():
            return None
        if log_entry["status"] >= 500 or not log_entry["status"]:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)
        return f"{span.get_span_context().trace_id:032x}"

    async def stop(self) -> None:
        """Sends the remaining spans, within five seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="qkv-traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _STOP_TIMEOUT_S)


def _attributes(
    log_entry: Mapping[str, Any], headers: Mapping[bytes, bytes], method: str, route: str | None
) -> dict[str, str | int | float]:
    attributes = {
        name: log_entry[key] for key, name in _NAMES.items() if log_entry.get(key) is not None
    }
    attributes |= {"http.request.method": method, "url.scheme": "http"}
    if not log_entry["status"]:
        del attributes["http.response.status_code"]
    if method == _OTHER and log_entry["method"] != "?":  # no method was received
        attributes["http.request.method_original"] = log_entry["method"][:_MAX_ATTRIBUTE_LENGTH]
    if route is not None:
        attributes["http.route"] = route
    if log_entry["status"] >= 500 or not log_entry["status"]:
        attributes["error.type"] = log_entry["outcome"]
    if agent := headers.get(b"user-agent"):
        attributes["user_agent.original"] = agent.decode("latin-1")[:_MAX_ATTRIBUTE_LENGTH]
    host, _, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
    if host and port.isdecimal():
        attributes |= {"server.address": host[:_MAX_ATTRIBUTE_LENGTH], "server.port": int(port[:5])}
    elif port:
        attributes["server.address"] = f"{host}:{port}".removeprefix(":")[:_MAX_ATTRIBUTE_LENGTH]
    return attributes
