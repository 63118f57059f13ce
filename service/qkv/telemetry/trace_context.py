"""The trace that a request belongs to, by its headers: `traceparent` of W3C Trace Context.

OpenTelemetry's propagators parse them; OTEL_PROPAGATORS chooses others. FastAPI needs its API too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context

_MAX_LENGTH: Final = 1024  # characters; W3C Trace Context, section 3.3.1.5, requires 512
# without baggage, which the service does not use
_HEADERS: Final = [
    (name.lower(), name.lower().encode())
    for name in propagate.get_global_textmap().fields
    if name != "baggage"
]
# its warnings repeat a client's text
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


def remote_context(headers: Mapping[bytes, bytes]) -> Context:
    """Returns the trace context of the headers of a request; an empty one if they have none, or an
    invalid one. Ignores long headers: the time to parse them grows with the square of their length.

    Args:
        headers: by their names in lower case.
    """
    carrier = {
        name: headers[key].decode("latin-1")
        for name, key in _HEADERS
        if key in headers and len(headers[key]) <= _MAX_LENGTH
    }
    return propagate.extract(carrier, Context()) if carrier else Context()


def remote_trace_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the id of the trace that a request continues, in hexadecimal; None: it has none."""
    context = remote_context(headers)
    trace_id = trace.get_current_span(context).get_span_context().trace_id if context else 0
    return f"{trace_id:032x}" if trace_id else None
