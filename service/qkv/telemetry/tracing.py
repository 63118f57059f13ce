"""Traces: a span of each request, sent to whatever collects them with OpenTelemetry's protocol.

The names are those of OpenTelemetry's conventions for HTTP servers. To be imported only where
traces are asked for: what it needs comes with the extra `tracing`, and takes a while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from qkv.version import __version__

__all__ = ["Traces"]

_STOP_TIMEOUT_S: Final = 5.0  # for what is left, when the service ends
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
_OTHER: Final = "_OTHER"
_MAX_ATTRIBUTE_LENGTH: Final = 512  # characters that a span has of what a caller says
_MAX_CONTEXT_LENGTH: Final = 1024  # characters; W3C's Trace Context, section 3.3.1.5, asks for 512
_NAMES: Final = {  # of what the log has of a request, as spans have it
    "status": "http.response.status_code",
    "path": "url.path",
    "bytes_in": "http.request.body.size",
    "bytes_out": "http.response.body.size",
    "request_id": "qkv.request_id",
    "variant": "qkv.variant",
    "outcome": "qkv.outcome",
    "queue_ms": "qkv.queue_ms",
    "transfer_ms": "qkv.transfer_ms",
    "compute_ms": "qkv.compute_ms",
}


class Traces:
    """The traces of one process. The standard's environment variables (OTEL_*) say where they go,
    which are kept and how long they wait to be sent."""

    def __init__(self) -> None:
        named = Resource({"service.name": "qkv", "service.version": __version__})
        named = named.merge(OTELResourceDetector().detect())  # what an operator says goes before
        self._provider = TracerProvider(
            resource=Resource.create(dict(named.attributes)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("qkv", __version__)
        fields = {name.lower().encode() for name in propagate.get_global_textmap().fields}
        self._read = fields - {b"baggage"}  # nobody here would look into it
        # its warnings are in a stranger's words
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

    def add(
        self,
        log_entry: Mapping[str, Any],
        headers: Iterable[tuple[bytes, bytes]],
        seconds: float,
        route: str | None,
    ) -> str | None:
        """Sends a request that ends now, soon, from its own thread.

        Args:
            log_entry: its entry in the request log.
            headers: its own, names in lower case.
            seconds: that it took.
            route: the path as the service has it, where there is one.

        Returns:
            The trace's id; None where this one is not kept.
        """
        now = time.time_ns()
        method = log_entry["method"] if log_entry["method"] in _METHODS else _OTHER
        name = "HTTP" if method == _OTHER else method
        span = self._tracer.start_span(
            name if route is None else f"{name} {route}",
            context=self._context(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(log_entry, dict(headers), method, route),
            start_time=now - int(seconds * 1e9),
        )
        if not span.is_recording():
            return None
        if log_entry["status"] >= 500 or not log_entry["status"]:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)
        return f"{span.get_span_context().trace_id:032x}"

    async def stop(self) -> None:
        """Sends what is left, if it is taken within a moment."""
        thread = threading.Thread(target=self._provider.shutdown, name="qkv-traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _STOP_TIMEOUT_S)

    def _context(self, headers: Iterable[tuple[bytes, bytes]]) -> Context:
        """What the request is part of, as its headers say (`traceparent`); what is long is not
        read, for reading takes time that grows with its square."""
        carrier: dict[str, str] = {}
        for name, value in headers:
            if name in self._read:
                key, text = name.decode(), value.decode("latin-1")
                carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
        carrier = {key: text for key, text in carrier.items() if len(text) <= _MAX_CONTEXT_LENGTH}
        return propagate.extract(carrier, Context()) if carrier else Context()


def _attributes(
    log_entry: Mapping[str, Any], headers: dict[bytes, bytes], method: str, route: str | None
) -> dict[str, str | int | float]:
    found = {name: log_entry[key] for key, name in _NAMES.items() if log_entry.get(key) is not None}
    found |= {"http.request.method": method, "url.scheme": "http"}
    if not log_entry["status"]:
        del found["http.response.status_code"]
    if method == _OTHER and log_entry["method"] != "?":  # which is none at all
        found["http.request.method_original"] = log_entry["method"][:_MAX_ATTRIBUTE_LENGTH]
    if route is not None:
        found["http.route"] = route
    if log_entry["status"] >= 500 or not log_entry["status"]:
        found["error.type"] = log_entry["outcome"]
    if agent := headers.get(b"user-agent"):
        found["user_agent.original"] = agent.decode("latin-1")[:_MAX_ATTRIBUTE_LENGTH]
    host, _, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
    if host and port.isdecimal():
        found |= {"server.address": host[:_MAX_ATTRIBUTE_LENGTH], "server.port": int(port[:5])}
    elif port:
        found["server.address"] = f"{host}:{port}".removeprefix(":")[:_MAX_ATTRIBUTE_LENGTH]
    return found
