"""The trace id of a request, by the rules of W3C Trace Context and the cases of its tests."""

from __future__ import annotations

import logging

import pytest

from qkv.telemetry.trace_context import remote_trace_id

TRACE = "12345678901234567890123456789012"
PARENT = "1234567890123456"


@pytest.mark.parametrize(
    "value",
    [
        f"00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-00",
        f"cc-{TRACE}-{PARENT}-01",  # a later version
        f"cc-{TRACE}-{PARENT}-01-future",
        f"cc-{TRACE}-{PARENT}-01-",
        f" 00-{TRACE}-{PARENT}-01\t",
    ],
)
def test_valid_traceparent_has_a_trace_id(value: str) -> None:
    assert remote_trace_id({b"traceparent": value.encode(), b"host": b"a"}) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-future",
        f"00-{TRACE}-{PARENT}-01.future",
        f"cc-{TRACE}-{PARENT}-01.future",
        f"00-{TRACE.replace('1', 'A')}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01,00-{TRACE}-{PARENT}-01",  # two headers
        f"00-{TRACE}-{PARENT}-01-" + "a" * 600,
        f"cc-{TRACE}-{PARENT}-01-" + "a" * 600,
        "\x9b31mFORGED\x85",
    ],
)
def test_invalid_traceparent_has_no_trace_id_and_no_log(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {b"traceparent": value.encode("latin-1"), b"tracestate": b"a" * 800}
    assert remote_trace_id(headers) is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_request_without_a_traceparent_has_no_trace_id() -> None:
    assert remote_trace_id({b"host": b"a"}) is None
    assert remote_trace_id({b"tracestate": b"a=1"}) is None
