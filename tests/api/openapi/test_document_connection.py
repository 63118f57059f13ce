"""The OpenAPI document has the errors of connections, for every operation."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from support.openapi_schemas import fits
from support.processes import TIMEOUT_S
from support.raw_connection import read_responses
from support.service import Server, running_server

REFUSED: Final = (400, 403, 408, 413, 431, 501)
CHUNKS: Final = b"1\r\n \r\n" * 400_000  # 2 MB around 400 KB


@pytest.fixture(scope="module")
def short_read_timeout() -> Iterator[Server]:
    """A service with a short read timeout, for two hosts."""
    with running_server(read_timeout_s=0.8, allowed_hosts="here") as server:
        yield server


@pytest.fixture(scope="module")
def document(short_read_timeout: Server) -> dict[str, Any]:
    found: dict[str, Any] = short_read_timeout.http.get("/openapi.json").json()
    return found


def heads(document: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Path and method of every operation, and the first line of a request for it."""
    for path, methods in document["paths"].items():
        for method in methods:
            filled = path.replace("{model}", "softmax").replace("{variant}", "softmax")
            yield path, method, f"{method.upper()} {filled} HTTP/1.1\r\n".encode()


def rejected_request(line: bytes, status: int) -> bytes:
    """Returns a request with that first line that is rejected with that status."""
    if status == 400:
        return line + b"\r\n"  # no Host
    if status == 403:
        return line + b"Host: elsewhere\r\nConnection: close\r\n\r\n"
    line += b"Host: localhost\r\n"
    if status == 408:
        return line
    if status == 501:
        return line + b"Transfer-Encoding: gzip, chunked\r\n\r\n"
    if status == 431:
        return line + b"".join(b"X-%d: v\r\n" % i for i in range(101)) + b"\r\n"
    return line + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS


def assert_documented(document: dict[str, Any], path: str, method: str, response: Any) -> None:
    """Asserts that the document has the response for the operation."""
    status, headers, body = response
    documented = document["paths"][path][method]["responses"][str(status)]
    schema = documented["content"][headers["content-type"]]["schema"]
    if headers["content-type"].endswith("json"):
        assert fits(json.loads(body), schema, document), body


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 403, 408, 431, 501])
def test_connection_errors_are_documented_for_every_operation(
    short_read_timeout: Server, document: dict[str, Any], status: int
) -> None:
    with ExitStack() as stack:
        requests = []
        for path, method, line in heads(document):
            connection = socket.create_connection(short_read_timeout.address, TIMEOUT_S)
            stack.enter_context(connection)
            connection.sendall(rejected_request(line, status))
            requests.append((path, method, connection))
        for path, method, connection in requests:
            (response,) = read_responses(connection)
            assert response[0] == status
            assert_documented(document, path, method, response)


@pytest.mark.slow
def test_framing_error_is_documented_for_operations_with_a_body(
    short_read_timeout: Server, document: dict[str, Any]
) -> None:
    """Other operations have responded by then; only the connection is closed afterwards."""
    for path, method, line in heads(document):
        with socket.create_connection(short_read_timeout.address, TIMEOUT_S) as connection:
            connection.sendall(rejected_request(line, 413))
            found = read_responses(connection)
        statuses = [response[0] for response in found]
        documented = "413" in document["paths"][path][method]["responses"]
        assert documented is (method == "post")
        if documented:
            assert statuses == [413], path
            assert_documented(document, path, method, found[0])
        else:
            assert len(statuses) == 1
            assert statuses != [413]


def test_response_to_an_endless_body_is_documented(
    short_read_timeout: Server, document: dict[str, Any]
) -> None:
    """A body that does not end gets a documented error, on every path with a body."""
    line = b"Host: localhost\r\nContent-Length: 10\r\n\r\n1"
    with ExitStack() as stack:
        requests = []
        for path, method, head in heads(document):
            connection = socket.create_connection(short_read_timeout.address, TIMEOUT_S)
            stack.enter_context(connection)
            connection.sendall(head + line)
            requests.append((path, method, connection))
        for path, method, connection in requests:
            found = read_responses(connection)
            for response in found:
                assert_documented(document, path, method, response)
            assert [a[0] for a in found][-1] == 408 or method == "get", path
