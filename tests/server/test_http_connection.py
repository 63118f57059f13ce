"""Limits of one connection in size; errors are sent after the pending responses."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    random_inputs,
    read_responses,
)
from support.service import Server, running_server
from support.small_requests import open_connection

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

LIVE: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
SQUARE: Final = [[1, 0], [0, 1]]
BODY: Final = json.dumps({"inputs": dict.fromkeys(("query", "key", "value"), SQUARE)}).encode()
RUN: Final = (
    b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


def only(connection: socket.socket, status: int) -> dict[str, Any]:
    """Returns the problem of the only response before the connection closes."""
    ((found, headers, body),) = read_responses(connection)
    assert found == status, body
    assert headers["connection"] == "close"
    problem: dict[str, Any] = json.loads(body)
    return problem


def lines_of(count: int, size: int = 10) -> bytes:
    return b"".join(b"X-%d: %b\r\n" % (i, b"v" * size) for i in range(count))


@pytest.mark.parametrize(
    "lines",
    [lines_of(101), lines_of(90, 800), b"X: " + b"v" * 70_000 + b"\r\n", lines_of(100_000)],
)
@pytest.mark.parametrize("start", [b"GET /livez", b"POST /v1/convert", b"POST " + PATH.encode()])
def test_head_over_the_limit_gets_431(server: Server, start: bytes, lines: bytes) -> None:
    with open_connection(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(start + b" HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        problem = only(connection, 431)
    assert ("error" in problem) is start.endswith(b"infer")
    assert server.http.get("/livez").status_code == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_endless_head_gets_431(server: Server, start: bytes) -> None:
    """The service buffers at most 1 MiB of a URL or a single header."""
    with open_connection(server) as connection:
        sent = 0
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            for _ in range(400):
                sent += connection.send(b"a" * 10_000)
                time.sleep(0.0005)
        assert only(connection, 431)
    assert sent > 1 << 20


def test_a_hundred_headers_are_accepted(server: Server) -> None:
    with open_connection(server) as connection:
        lines = lines_of(98, 600)
        connection.sendall(LIVE[:-2] + lines + b"Connection: close\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [200]


CHUNKED: Final = (
    b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def test_too_many_tiny_chunks_get_413(server: Server) -> None:
    with open_connection(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(CHUNKED + b"1\r\n \r\n" * 400_000)
        assert "chunks" in only(connection, 413)["detail"]


@pytest.mark.parametrize(
    ("last", "status"), [(b"5;x=" + b"a" * 2_000_000, 413), (b"0\r\n" + lines_of(100_000), 431)]
)
def test_chunk_extensions_and_trailers_are_limited(
    server: Server, last: bytes, status: int
) -> None:
    with open_connection(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n" + last)
        assert read_responses(connection)[-1][0] == status


@pytest.mark.parametrize(
    ("trailers", "status"),
    [(b"", 200), (b"Content-Encoding: br\r\nHost: b\r\n", 200), (b"Content-Length: 3\r\n", 400)],
)
def test_chunked_body_with_trailers_is_read(server: Server, trailers: bytes, status: int) -> None:
    """Trailers are not headers."""
    pieces = [BODY[i : i + 3] for i in range(0, len(BODY), 3)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    with open_connection(server) as connection:
        connection.sendall(CHUNKED + chunks + b"0\r\n" + trailers + b"\r\n" + b"malformed\r\n\r\n")
        found = [status for status, *_ in read_responses(connection)]
    assert found == ([200, 400] if status == 200 else [400])


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
        (b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 501),
        (b"transfer-encoding: Chunked \r\n", 200),
    ],
)
def test_only_the_transfer_coding_chunked_is_supported(
    server: Server, lines: bytes, status: int
) -> None:
    """An ignored coding would make another request of the body (RFC 9112, section 6.1)."""
    head = CHUNKED.replace(b"Transfer-Encoding: chunked\r\n", lines)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    with open_connection(server) as connection:
        connection.sendall(
            head + chunks + LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        found = [status for status, *_ in read_responses(connection)]
    assert found == ([200, 200] if status == 200 else [status])


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n"])
@pytest.mark.parametrize("start", [b"GET /livez", b"POST " + PATH.encode()])
def test_missing_or_second_host_gets_400(server: Server, start: bytes, hosts: bytes) -> None:
    with open_connection(server) as connection:
        connection.sendall(start + b" HTTP/1.1\r\n" + hosts + b"\r\n")
        assert only(connection, 400)


def test_http_1_0_needs_no_host(server: Server) -> None:
    with open_connection(server) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [200]


def test_http_1_0_gets_no_interim_response(server: Server) -> None:
    """Such a client would take it for the response (RFC 9110, section 10.1.1)."""
    head = RUN.replace(b"HTTP/1.1", b"HTTP/1.0")[:-2] + b"Expect: 100-continue\r\n\r\n"
    with open_connection(server) as connection:
        connection.sendall(head)
        time.sleep(0.2)  # for the head to be read
        connection.sendall(BODY)
        assert [status for status, *_ in read_responses(connection)] == [200]


def test_streamed_response_to_http_1_0_ends_with_the_connection(server: Server) -> None:
    """RFC 9112, section 6.1: no transfer coding for such a client."""
    body = b'{"variants": ["mean"], "lengths": [2], "repeats": 1}'
    head = b"POST /v1/sweep HTTP/1.0\r\nContent-Type: application/json\r\n"
    with open_connection(server) as connection:
        connection.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        response = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, events = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events.startswith(b"event: ")
    assert b"event: done\n" in events


MALFORMED: Final = (
    b"malformed\r\n\r\n",
    b"\x16\x03\x01\x02",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/0.9\r\nHost: localhost\r\n\r\n",
    b"GET\r\n\r\n",
)


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("count", [0, 5])
def test_malformed_request_gets_400_after_pending_responses(
    server: Server, malformed: bytes, count: int
) -> None:
    infer = encode_request(*encode_body(random_inputs(0)))
    for request in (LIVE, RUN + BODY, infer, infer + LIVE + RUN + BODY):
        each = 3 if request.startswith(infer + b"GET") else 1
        with open_connection(server) as connection:
            connection.sendall(request * count + malformed)
            statuses = [status for status, *_ in read_responses(connection)]
        assert statuses == [200] * (each * count) + [400]


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"GET / HTTP/x\r\n\r\n", "version"),
        (b"G@T / HTTP/1.1\r\n\r\n", "method"),
        (b"GET / HTTP/1.1\r\na b: c\r\n\r\n", "header"),
        (CHUNKED + b"zz\r\n", "chunk"),
    ],
)
def test_error_says_what_is_malformed(server: Server, sent: bytes, problem: str) -> None:
    with open_connection(server) as connection:
        connection.sendall(sent)
        assert problem in only(connection, 400)["detail"]


def test_host_of_an_absolute_target_counts(server: Server) -> None:
    """RFC 9112, section 3.2.2."""
    for target, host, status in (
        (b"http://evil.example/livez", b"localhost", 403),
        (b"http://localhost/livez", b"evil.example", 200),
    ):
        with open_connection(server) as connection:
            connection.sendall(
                b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, host)
            )
            assert [status for status, *_ in read_responses(connection)] == [status]


@pytest.mark.parametrize("escaped", ["/v1/attention%2fsoftmax", "/v1%2Fattention/softmax"])
def test_path_with_an_escaped_slash_does_not_exist(server: Server, escaped: str) -> None:
    """A rule of a gateway about paths would not see the slash."""
    head = RUN.replace(b"/v1/attention/softmax", escaped.encode())
    with open_connection(server) as connection:
        connection.sendall(head + BODY + RUN.replace(b"softmax", b"soft%6dax") + BODY)
        connection.sendall(b"malformed\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [404, 200, 400]


@pytest.mark.parametrize("wait", [0, 0.2])
def test_malformed_body_gets_400_after_pending_responses(server: Server, wait: float) -> None:
    """Its request gets 400, earlier requests get their responses."""
    with open_connection(server) as connection:
        connection.sendall((RUN + BODY) * 3 + CHUNKED + b"5\r\n12345\r\n")
        time.sleep(wait)
        connection.sendall(b"malformed")
        assert [status for status, *_ in read_responses(connection)] == [200, 200, 200, 400]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_upgrade_headers_are_ignored(server: Server, protocol: bytes) -> None:
    """Requests after an upgrade header are not lost."""
    lines = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAM\r\n" % protocol
    )
    run = RUN[:-2] + lines + b"\r\n" + BODY
    for request in (run, LIVE[:-2] + lines + b"\r\n"):
        with open_connection(server) as connection:
            connection.sendall(request * 2 + LIVE + b"malformed\r\n\r\n")
            assert [status for status, *_ in read_responses(connection)] == [200, 200, 200, 400]
    with open_connection(server) as connection:
        for i in range(0, len(run), 7):
            connection.sendall(run[i : i + 7])
        close = lines.replace(b"Upgrade,", b"Upgrade, close,")
        connection.sendall(LIVE[:-2] + close + b"\r\n")
        assert [status for status, *_ in read_responses(connection)] == [200, 200]


@pytest.mark.slow
def test_many_pipelined_upgrade_requests_are_served(server: Server) -> None:
    lines = b"Connection: upgrade\r\nUpgrade: x\r\n"
    with open_connection(server) as connection:
        connection.sendall(RUN + BODY + (LIVE[:-2] + lines + b"\r\n") * 1200 + b"malformed\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [200] * 1201 + [400]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost", 200),
        (b"http://localhost?a=b", 200),
        (b"HTTP://localhost:80?c", 200),
        (b"http://localhost/livez", 200),
        (b"http://localhost/nowhere", 404),
        (b"http://[::1]/livez", 200),
        (b"http://[::1]:80/livez", 200),
        (b"http://[2001:db8::1]/livez", 403),
        (b"*", 404),
        (b"localhost", 400),
    ],
)
def test_absolute_form_targets(server: Server, target: bytes, status: int) -> None:
    """A target without a path means "/"."""
    with open_connection(server) as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\nrubbish\r\n\r\n" % target)
        assert read_responses(connection)[0][0] == status


def test_connect_gets_400(server: Server) -> None:
    with open_connection(server) as connection:
        connection.sendall(b"CONNECT there:443 HTTP/1.1\r\nHost: there:443\r\n\r\n")
        assert only(connection, 400)


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/docs", "/openapi.json", "/v1/variants", "/v2", "/v2/health/live"]
)
def test_head_responds_as_get_without_a_body(server: Server, path: str) -> None:
    head, full = server.http.head(path), server.http.get(path)
    assert head.status_code == full.status_code == 200
    assert not head.content
    assert head.headers["content-length"] == full.headers["content-length"]
    assert head.headers["content-type"] == full.headers["content-type"]
    assert server.http.get(path).status_code == 200  # the HEAD response has sent no body
    assert server.http.put(path).headers["allow"] == "GET, HEAD"


def test_repeated_content_encoding_header_gets_415(server: Server) -> None:
    for codings in (["gzip", "br"], ["identity", "gzip"], ["br", "gzip"]):
        headers = [("Content-Encoding", coding) for coding in codings]
        response = server.http.post("/v1/attention/softmax", content=BODY, headers=headers)
        assert response.status_code == 415


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"Content-Length: 999999999999\r\n\r\n", 413), (b"malformed\r\n\r\n", 400)],
)
def test_bytes_after_the_response_are_limited(
    server: Server, monkeypatch: pytest.MonkeyPatch, head: bytes, status: int
) -> None:
    # the real limit is 256 MiB
    monkeypatch.setattr("qkv.server.http_protocol._MAX_IGNORED_BYTES", 1 << 20)
    with open_connection(server) as connection:
        connection.sendall(b"POST /v1/convert HTTP/1.1\r\nHost: localhost\r\n" + head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status)
        with pytest.raises(ConnectionError):
            connection.sendall(b"a" * 100_000_000)


def test_bytes_after_one_response_do_not_count_for_the_next() -> None:
    small = running_server(max_body_bytes=1000)
    with small as server, open_connection(server) as connection:
        connection.sendall(RUN.replace(b"%d" % len(BODY), b"2000") + b"a" * 2000 + LIVE)
        connection.sendall(b"malformed\r\n\r\n")
        assert [status for status, *_ in read_responses(connection)] == [413, 200, 400]


def has(server: Server, connection: socket.socket) -> bool:
    """Returns True if the service still has the connection."""
    return connection.getsockname() in server.clients


@pytest.mark.slow
def test_clients_that_send_all_first_get_their_responses(server: Server) -> None:
    """Tests both values of Connection, with a body slower than the linger timeout.

    All cases at the same time: most of them wait for the linger timeout.
    """
    size = 8 << 20

    def send(start: str, status: int, connection_header: str) -> None:
        head = f"{start} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection_header}\r\n"
        with open_connection(server) as connection:
            connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
            for _ in range(8):
                connection.sendall(bytes(size // 8))
                time.sleep(0.1)
            received = connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 %d " % status), (start, connection_header)
            if connection_header == "keep-alive":
                connection.sendall(LIVE)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 "), start
            else:
                wait_until(lambda: not has(server, connection))

    starts = {"POST /nowhere": 404, "POST /v1/variants": 405, "GET /livez": 200}
    cases = [(*start, header) for start in starts.items() for header in ("close", "keep-alive")]
    with ThreadPoolExecutor(len(cases)) as pool:
        sent = [pool.submit(send, *case) for case in cases]
        for each in sent:
            each.result(TIMEOUT_S)
