"""Every response has a request id on every path, and every request optionally a log line."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from qkv.api.job_runner import JobRunner
from qkv.jobs.plan import Plan
from support.processes import TIMEOUT_S, Process
from support.raw_connection import encode_body, encode_request, random_inputs, raw_client
from support.service import Server
from support.service_processes import JSON, PATH, TINY_BODY

INFER: Final = "/v2/models/softmax/infer"
MADE: Final = re.compile(r"[0-9a-f]{24,}")
ID: Final = "X-Request-ID"
BAD: Final = [
    b"", b"a b", b"a" * 129, b"a\tb", b'a"b', b"<x>", b"a,b", b"\xc3\xa9", b"a;b", b"{}", b"a\\n",
]  # fmt: skip


def test_response_has_the_id_of_the_request_on_every_path(server: Server) -> None:
    body, length = encode_body(random_inputs(3))
    with raw_client(server) as caller:
        for i in range(6):
            caller.send(encode_request(body, length, INFER, f"x-request-ID: a-{i}"))
            assert caller.read_response()[0]["x-request-id"] == f"a-{i}"
    for method, path in (
        ("POST", PATH), ("POST", f"{PATH}?a=b"), ("GET", "/v1/variants"), ("HEAD", "/livez"),
        ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/docs"),
    ):  # fmt: skip
        headers = {ID: f"of {path}".replace(" ", ":").replace("?", "_"), **JSON}
        response = server.http.request(method, path, content=TINY_BODY, headers=headers)
        assert response.status_code == 200
        assert response.headers.get_list(ID) == [headers[ID]]


def test_request_without_an_id_gets_a_new_one(server: Server) -> None:
    body, length = encode_body(random_inputs(3))
    ids = []
    with raw_client(server) as caller:
        for _ in range(20):
            caller.send(encode_request(body, length))
            ids.append(caller.read_response()[0]["x-request-id"])
    ids += [server.http.get(path).headers[ID] for path in ("/livez", "/nowhere") * 10]
    assert len(set(ids)) == 40
    assert all(MADE.fullmatch(id) for id in ids)


def test_error_responses_have_an_id(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_body_bytes=1000)
    statuses: list[int] = []

    def ask(
        method: str, path: str, content: bytes = TINY_BODY, type: str = "application/json"
    ) -> None:
        id = f"number-{len(statuses)}"
        response = server.http.request(
            method, path, content=content, headers={"Content-Type": type, ID: id}
        )
        assert response.headers.get_list(ID) == [id]
        statuses.append(response.status_code)

    ask("POST", PATH, b"{")
    ask("POST", PATH, b"{}")
    ask("POST", PATH, b" " * 2000)
    ask("POST", PATH, type="text/html")
    ask("POST", "/v1/attention/none")
    ask("DELETE", PATH)
    ask("POST", INFER, b"{}")
    monkeypatch.setattr(Plan, "from_message", lambda *_: 1 / 0)
    ask("POST", PATH)
    assert statuses == [400, 422, 413, 415, 404, 405, 400, 500]
    server.runtime.worker.shared_state.drain()
    ask("POST", "/v1/sweep")
    ask("GET", "/v2/models/softmax/ready")
    assert statuses[-2:] == [503, 503]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_ids_are_not_repeated(server: Server, bad: bytes) -> None:
    """On no path, and however often they come."""
    body, length = encode_body(random_inputs(3))
    with raw_client(server) as caller:
        for _ in range(3):
            whole = encode_request(body, length, INFER)
            caller.send(whole.replace(b"\r\n\r\n", b"\r\nX-Request-ID: %b\r\n\r\n" % bad, 1))
            assert MADE.fullmatch(caller.read_response()[0]["x-request-id"])
    response = server.http.get("/livez", headers=[(ID.encode(), bad)])
    assert MADE.fullmatch(response.headers[ID])


def test_internal_error_is_logged_with_the_request_id(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(JobRunner, "run", lambda *_: 1 / 0)
    body, length = encode_body(random_inputs(3), id="7")
    for path in (INFER, "/v2/models/softmax/versions/1/infer"):  # FastAPI has handled the second
        headers = {ID: "it-was-me", "Inference-Header-Content-Length": str(length)}
        assert server.http.post(path, content=body, headers=headers).status_code == 500
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("qkv.api.")]
    assert len(ours) == 2
    assert all("it-was-me" in message for message in ours)


def test_connection_stays_open_after_an_internal_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On direct routes and behind FastAPI. A client may send its next request at once."""
    with raw_client(server) as caller:
        for path in (INFER, "/v2/models/softmax/versions/1/infer"):
            request = encode_request(*encode_body(random_inputs(3), id=f"new at {path}"), path)
            with monkeypatch.context() as patch:
                patch.setattr(JobRunner, "run", lambda *_: 1 / 0)
                caller.send(request)
                assert caller.status() == 500
                caller.rest()
            caller.send(request)
            assert caller.status() == 200
            caller.rest()


# ---------------------------------------------------------------- the log


@contextmanager
def logging_to(path: Path, *arguments: str, **environment: str) -> Iterator[Process]:
    """A service with a file as standard output."""
    with path.open("wb") as file:
        process = Process(("serve", "--port", "0", *arguments), environment, file)
        try:
            assert process.url
            yield process
        finally:
            if process.popen.poll() is None:
                process.kill()
            process.wait()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.process
def test_request_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "log"
    body, length = encode_body(random_inputs(0))
    infer = {"Inference-Header-Content-Length": str(length)}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with logging_to(path, "--workers", "1", QKV_REQUEST_LOG="json") as process:
        with httpx.Client(base_url=process.url, timeout=60) as http:
            for i in range(5):
                headers = infer | trace | {ID: f"short-{i}"}
                last = http.post(f"{INFER}?secret=1", content=body, headers=headers)
            http.post(PATH, content=TINY_BODY, headers=JSON | {ID: "native"})
            http.post("/v1/attention/none", content=TINY_BODY, headers={ID: "unknown"})
            http.get("/v1/" + "é" * 3000, headers={ID: "long"})
            http.get("/v1/%0a%22%00", headers={ID: "odd"})
        assert process.end() == 0, process.lines
    lines = {line["request_id"]: line for line in lines_of(path)}
    assert list(lines) == [*(f"short-{i}" for i in range(5)), "native", "unknown", "long", "odd"]
    short = lines["short-4"]
    assert short == lines["short-0"] | {
        name: short[name]
        for name in short
        if name in ("time", "request_id", "bytes_out") or "_ms" in name
    }
    assert (short["method"], short["path"], short["variant"]) == ("POST", INFER, "softmax")
    assert (short["status"], short["outcome"]) == (200, "ok")
    assert (short["bytes_in"], short["bytes_out"]) == (len(body), len(last.content))
    assert short["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert "secret" not in path.read_text()
    for line in (short, lines["short-0"], lines["native"]):
        assert 0 < line["compute_ms"] <= line["duration_ms"]
        assert 0 <= line["queue_ms"] <= line["duration_ms"]
        age = time.time() - datetime.fromisoformat(line["time"]).timestamp()
        assert 0 <= age < TIMEOUT_S
    assert "trace_id" not in lines["native"]
    unknown = {"variant": "unknown", "status": 404, "outcome": "not-found"}
    assert unknown.items() <= lines["unknown"].items()
    assert "compute_ms" not in lines["unknown"]
    assert lines["odd"]["path"] == "/v1/%0a%22%00"  # not decoded
    assert (lines["odd"]["variant"], lines["odd"]["bytes_in"]) == (None, None)
    assert max(map(len, path.read_bytes().splitlines())) < 4096


ERRORS: Final = [
    (b"rubbish\r\n\r\n", 400, "malformed-request", "?", ""),
    (b"GET /livez HTTP/1.1\r\nX-Request-ID: mine\r\n\r\n", 400, "malformed-request", "GET",
     "/livez"),
    (b"PUT /a?b HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"x" * 70_000), 431,
     "headers-too-large", "PUT", "/a"),
    (b"GET /livez HTTP/1.1\r\nHost: a\r\n", 408, "request-timeout", "GET", "/livez"),
    (b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n"
     b"Content-Length: 9\r\n\r\n{", 408, "request-timeout", "POST", PATH),
    (b"POST http://localhost/v1/attention/soft%6dax HTTP/1.1\r\nHost: localhost\r\n"
     b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "malformed-request", "POST",
     "/v1/attention/soft%6dax"),
    (b"POST http://a/v2/models/softmax/infer HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400,
     "malformed-request", "POST", INFER),
]  # fmt: skip
"""Bytes of a connection, and the status, outcome, method and path of their error."""


def counts(metrics: str, name: str) -> Counter[str]:
    """Returns the samples of a counter by their labels."""
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", metrics, re.MULTILINE)
    return Counter({labels: int(float(count)) for labels, count in found if float(count)})


@pytest.mark.process
def test_connection_errors_are_observed(tmp_path: Path) -> None:
    """Each has an id, one log line and one count."""
    log, responses = tmp_path / "log", []
    how = {"QKV_REQUEST_LOG": "json", "QKV_READ_TIMEOUT_S": "0.5"}
    with logging_to(log, "--workers", "1", **how) as process:
        url = httpx.URL(process.url)
        assert url.port
        for sent, *_ in ERRORS:
            with socket.create_connection((url.host, url.port), TIMEOUT_S) as connection:
                connection.sendall(sent)
                response = b""
                while chunk := connection.recv(1 << 16):
                    response += chunk
            responses.append(response)
        metrics = httpx.get(f"{process.url}/metrics").text
        assert process.end() == 0
    lines = [line for line in lines_of(log) if line["path"] != "/metrics"]
    for (sent, status, outcome, method, path), response, line in zip(
        ERRORS, responses, lines, strict=True
    ):
        assert response.startswith(b"HTTP/1.1 %d " % status)
        assert (line["method"], line["path"], line["outcome"]) == (method, path, outcome)
        head, _, body = response.partition(b"\r\n\r\n")
        assert (line["status"], line["bytes_out"]) == (status, len(body))
        assert line["variant"] == ("softmax" if method == "POST" else None)
        ids = re.findall(rb"(?i)x-request-id: (\S+)", head)
        assert ids == [line["request_id"].encode()]
        assert body.startswith(b'{"error":' if path == INFER else b'{"type":"urn:qkv:problem:')
        assert (b"mine" in ids) == (b"mine" in sent)
    rejected = Counter(f'reason="{outcome}"' for _, _, outcome, *_ in ERRORS)
    assert counts(metrics, "qkv_rejected_total") == rejected
    runs = Counter(
        f'outcome="{outcome}",variant="softmax"'
        for _, _, outcome, method, _ in ERRORS
        if method == "POST"
    )
    assert counts(metrics, "qkv_requests_total") == runs


@pytest.mark.process
def test_log_lines_of_workers_are_complete(tmp_path: Path) -> None:
    """Several workers write to one pipe, until SIGTERM."""
    body, length = encode_body(random_inputs(0))
    reader, writer = os.pipe()
    written: list[bytes] = []

    def read() -> None:
        while chunk := os.read(reader, 1 << 16):
            written.append(chunk)

    listener = threading.Thread(target=read)
    listener.start()
    process = Process(
        ("serve", "--port", "0", "--workers", "3"), {"QKV_REQUEST_LOG": "json"}, writer
    )
    os.close(writer)
    try:

        def post(k: int) -> None:
            with httpx.Client(base_url=process.url, timeout=60) as http:
                for i in range(40):
                    headers = {"Inference-Header-Content-Length": str(length), ID: f"{k}-{i}"}
                    assert http.post(INFER, content=body, headers=headers).status_code == 200

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(post, range(8)))
        assert process.end() == 0
    finally:
        if process.popen.poll() is None:
            process.kill()
        process.wait()
        listener.join(TIMEOUT_S)
        os.close(reader)
    ids = [json.loads(line)["request_id"] for line in b"".join(written).splitlines()]
    assert Counter(ids) == {f"{k}-{i}": 1 for k in range(8) for i in range(40)}


@pytest.mark.process
def test_nothing_is_logged_by_default(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with logging_to(path, "--workers", "1") as process:
        assert httpx.post(process.url + PATH, content=TINY_BODY, headers=JSON).status_code == 200
        assert process.end() == 0
    assert path.read_bytes() == b""
