"""Traces: the spans of every path reach a collector; without traces the SDK is not imported."""

from __future__ import annotations

import contextlib
import gzip
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from qkv import __version__
from qkv.tracing_variables import is_tracing_enabled
from support.processes import TIMEOUT_S, Process, killed_at_the_end, wait_until
from support.raw_connection import PATH as INFER
from support.raw_connection import encode_body, encode_request, random_inputs, raw_client
from support.service import Server, running_server
from support.service_processes import PATH, TINY_BODY

SERVER: Final = 2  # SPAN_KIND_SERVER
ERROR: Final = 2  # STATUS_CODE_ERROR
TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = "00f067aa0ba902b7"


def traceparent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}


@dataclass
class Collector:
    """The spans and resources that an OTLP/HTTP collector has received."""

    url: str
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def named(self, **attributes: Any) -> list[Any]:
        """Returns the spans with these attributes; two underscores stand for a dot."""
        expected = {name.replace("__", "."): value for name, value in attributes.items()}
        return [span for span in self.spans if expected.items() <= attributes_of(span).items()]


def attributes_of(span: Any) -> dict[str, Any]:
    """Returns the attributes of a span or resource."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                found.resources.append(
                    {a.key: a.value.string_value for a in part.resource.attributes}
                )
                for scope in part.scope_spans:
                    assert (scope.scope.name, scope.scope.version) == ("qkv", __version__)
                    found.spans.extend(scope.spans)
            response = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        found = Collector(f"http://127.0.0.1:{http.server_port}")
        yield found
        http.shutdown()
        thread.join(TIMEOUT_S)


@pytest.fixture
def collector(running_collector: Collector) -> Collector:
    """Returns a collector that has received nothing; a test waits for all spans of its requests."""
    running_collector.spans.clear()
    running_collector.resources.clear()
    return running_collector


@pytest.fixture(scope="module")
def traced(_clean_environment: None, running_collector: Collector) -> Iterator[Server]:
    """Returns a service that sends its traces to the collector every 50 ms."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running_collector.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            server = stack.enter_context(running_server(allowed_hosts="*"))
        yield server


def test_requests_on_one_connection_are_traced(traced: Server, collector: Collector) -> None:
    """Each with its own traceparent header."""
    with raw_client(traced) as caller:
        for i in range(4):
            line = f"traceparent: 00-{TRACE}-{i + 1:016x}-01"
            lines = (line, "baggage: a=1", f"User-Agent: test/{i}")
            caller.send(encode_request(*encode_body(random_inputs(0)), INFER, *lines))
            caller.read_response()
    wait_until(lambda: len(collector.spans) == 4)
    for i, span in enumerate(sorted(collector.spans, key=lambda s: bytes(s.parent_span_id))):
        assert span.name == "POST /v2/models/{model}/infer"
        assert span.kind == SERVER
        assert span.trace_id.hex() == TRACE
        assert int.from_bytes(span.parent_span_id, "big") == i + 1
        attributes = attributes_of(span)
        assert attributes["http.request.method"] == "POST"
        assert attributes["http.route"] == "/v2/models/{model}/infer"
        assert attributes["http.response.status_code"] == 200
        assert attributes["url.path"] == INFER
        assert attributes["url.scheme"] == "http"
        assert attributes["server.address"] == "localhost"
        assert attributes["user_agent.original"] == f"test/{i}"
        assert attributes["qkv.variant"] == "softmax"
        assert "error.type" not in attributes
        assert attributes["http.request.body.size"] == len(encode_body(random_inputs(0))[0])
        took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        stages = [attributes[f"qkv.{stage}_ms"] for stage in ("queue", "transfer", "compute")]
        assert 0 < sum(stages) <= took_ms
        assert abs(time.time_ns() - span.end_time_unix_nano) < TIMEOUT_S * 1e9
        assert span.status.code == 0


@pytest.mark.parametrize(
    "lines",
    [
        {"baggage": "a" + " " * 30_000 + "b"},
        {"baggage": ",".join(f"a{i}=\x9b" for i in range(180))},
        {"tracestate": "a" + " " * 30_000 + "b"},
        {"tracestate": "\x9b31mFORGED\x85line=1"},
        {"tracestate": ",".join(f"a{i}=b" for i in range(40))},
        {"content-length": str(2**63)},
        {"content-length": str(2**64 - 1)},
    ],
    ids=lambda lines: " ".join(lines),
)
def test_malformed_trace_headers_log_nothing(
    traced: Server, collector: Collector, caplog: pytest.LogCaptureFixture, lines: dict[str, str]
) -> None:
    """Malformed headers cause no warning with a client's text, and no quadratic parsing."""
    host, port = traced.address
    said_of = {"Host": host, "Connection": "close"} | traceparent() | lines
    head = "".join(f"{name}: {value}\r\n" for name, value in said_of.items())
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        connection.sendall(f"GET /livez HTTP/1.1\r\n{head}\r\n".encode("latin-1"))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert span.trace_id.hex() == TRACE
    assert "http.request.body.size" not in attributes_of(span)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [("a:80", "a", 80), ("a:\xb2", "a:\xb2", None), ("a:", None, None), ("a", "a", None)],
)
def test_server_address_of_a_span(
    traced: Server, collector: Collector, host: str, address: str | None, port: int | None
) -> None:
    """A superscript two is a digit, but not a decimal one."""
    headers = [(b"Host", host.encode("latin-1"))]
    assert traced.http.get("/v1/variants", headers=headers).is_success
    wait_until(lambda: len(collector.spans) == 1)
    attributes = attributes_of(collector.spans[0])
    assert attributes.get("server.address") == address
    assert attributes.get("server.port") == port


def test_requests_of_every_handler_are_traced(traced: Server, collector: Collector) -> None:
    http, port = traced.http, traced.address[1]
    responses = [
        http.post(PATH, content=TINY_BODY, headers=traceparent()),
        http.post(PATH, content=b"[]", headers=traceparent()),
        http.get("/v1/variants/softmax?a=1", headers=traceparent()),
        http.get("/nowhere"),
        http.request("PURGE", "/livez"),
        http.post("/v1/attention/sotfmax", content=TINY_BODY),
    ]
    assert [a.status_code for a in responses] == [200, 400, 200, 404, 405, 404]
    wait_until(lambda: len(collector.spans) == 6)
    by_id = {attributes_of(span)["qkv.request_id"]: span for span in collector.spans}
    spans = [by_id[a.headers["X-Request-ID"]] for a in responses]
    assert [span.name for span in spans] == [
        f"POST {PATH}", f"POST {PATH}", "GET /v1/variants/{variant}", "GET", "HTTP /livez",
        "POST /v1/attention/{variant}",
    ]  # fmt: skip
    for span, response in zip(spans, responses, strict=True):
        attributes = attributes_of(span)
        assert attributes["http.response.status_code"] == response.status_code
        assert attributes["server.port"] == port
        assert span.status.code == 0  # a client's error is not an error of a server span
        assert attributes["http.response.body.size"] == len(response.content)
    for span in spans[:3]:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.trace_state == "vendor=1"
    assert len({span.trace_id for span in spans[2:]}) == 4
    assert not any(span.parent_span_id for span in spans[3:])
    assert attributes_of(spans[0])["qkv.compute_ms"] > 0
    assert attributes_of(spans[1])["qkv.outcome"] == "malformed-request"
    assert attributes_of(spans[4])["http.request.method"] == "_OTHER"
    assert attributes_of(spans[4])["http.request.method_original"] == "PURGE"
    assert attributes_of(spans[2])["url.path"] == "/v1/variants/softmax"


def test_internal_error_sets_the_status_of_the_span(
    traced: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("qkv.jobs.plan.Plan.from_message", broken)
    body = TINY_BODY.replace(b"1.0, 0.0", b"1.0").replace(b"0.0, 1.0", b"1.0")  # of no known plan
    assert traced.http.post(PATH, content=body).status_code == 500
    wait_until(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert span.status.code == ERROR
    assert attributes_of(span)["error.type"] == "internal"


@pytest.mark.parametrize(
    ("sampler", "sampled"),
    [("parentbased_always_on", {"01"}), ("always_off", set()), ("always_on", {"00", "01"})],
)
def test_environment_selects_the_sampled_traces(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str, sampled: set[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with running_server() as server:
        for flags in ("00", "01"):
            headers = {"X-Request-ID": flags} | traceparent(flags)
            server.http.post(PATH, content=TINY_BODY, headers=headers).raise_for_status()
    assert len(collector.spans) == len(sampled)
    assert {attributes_of(span)["qkv.request_id"] for span in collector.spans} == sampled


def test_every_worker_sends_remaining_spans_at_sigterm(
    collector: Collector, command: Callable[..., Process]
) -> None:
    """The device process has none to send."""
    process = command(
        *("serve", "--port", "0", "--workers", "2"),
        QKV_DEVICE_PROCESS="one",
        QKV_REQUEST_LOG="json",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="600000",
        OTEL_SERVICE_NAME="team-attention",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    assert process.url

    def ask(i: int) -> None:
        headers = {"X-Request-ID": f"r-{i}"} | traceparent()
        response = httpx.post(
            process.url + PATH, content=TINY_BODY, headers=headers, timeout=TIMEOUT_S
        )
        response.raise_for_status()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(30)))
    assert collector.spans == []
    assert process.end() == 0
    spans = collector.named(url__path=PATH)
    assert {attributes_of(span)["qkv.request_id"] for span in spans} == {
        f"r-{i}" for i in range(30)
    }
    assert all(attributes_of(span)["qkv.compute_ms"] > 0 for span in spans)
    assert len(collector.resources) == 2  # both workers
    for resource in collector.resources:
        assert resource["service.name"] == "team-attention"
        assert resource["service.version"] == __version__
        assert resource["deployment.environment.name"] == "test"


def test_unreachable_collector_delays_nothing(
    command: Callable[..., Process],
) -> None:
    process = command("serve", "--port", "0", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    for _ in range(20):
        httpx.post(process.url + PATH, content=TINY_BODY, timeout=TIMEOUT_S).raise_for_status()
    assert process.end() == 0  # within QKV_DRAIN_S


ENDPOINT: Final = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environment", "is_enabled"),
    [
        ({}, False), ({"OTEL_SERVICE_NAME": "a"}, False), (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False), ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)  # fmt: skip
def test_environment_enables_traces(environment: dict[str, str], is_enabled: bool) -> None:
    assert is_tracing_enabled(environment) is is_enabled


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OTEL_TRACES_EXPORTER", "console", "otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
    ],
)
def test_unsupported_exporter_or_protocol_is_rejected(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{expected}"):
        is_tracing_enabled(ENDPOINT | {name: value})


def run_program(program: str, **environment: str) -> tuple[int, str]:
    """Returns the exit status of a program and what it wrote to stderr."""
    process = Process((program,), environment, module="support.forked_program")
    with killed_at_the_end(process):
        return process.wait(), "\n".join(process.lines)


@pytest.mark.process
def test_missing_extra_error_names_the_install_command() -> None:
    """None in `sys.modules` makes a module missing."""
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; from qkv.cli.main import main;"
        "sys.argv = ['qkv', 'serve', '--port', '0']; main()"
    )
    status, stderr = run_program(program, **ENDPOINT)
    assert status == 1
    assert re.search(r"pip install '\.\[tracing\]'", stderr), stderr


@pytest.mark.process
def test_opentelemetry_sdk_is_not_imported_without_traces() -> None:
    """FastAPI imports only the interface of OpenTelemetry."""
    program = (
        "import sys, qkv.server.startup; from qkv.api.app import create_app;"
        "from qkv.settings import Settings;"
        "create_app(Settings(device='cpu'));"
        "made = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf',"
        "'qkv.telemetry.tracing');"
        "assert not [n for n in sys.modules if n.startswith(made)]"
    )
    assert run_program(program) == (0, "")
