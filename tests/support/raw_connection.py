"""Requests on a plain socket, without an HTTP library."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job
from qkv.tensors import RawTensor
from qkv.wire import open_inference
from qkv.wire.message import Message
from support.known_requests import Array
from support.processes import TIMEOUT_S
from support.service import Server

PATH: Final = "/v2/models/softmax/infer"
NAMES: Final = ("query", "key", "value")


@pytest.fixture
def server_jobs(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Returns a list to which each job is appended that `server` executes."""
    jobs: list[Job] = []

    def recorded(batch: Sequence[Job], *how: Any) -> Launched:
        jobs.extend(batch)
        return launch(batch, *how)

    monkeypatch.setattr(server.engine.batch_runner, "launch", recorded)
    return jobs


def random_inputs(
    seed: int, shape: tuple[int, ...] = (1, 2, 8, 16), dtype: Any = np.float32
) -> Any:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name in NAMES}


def inputs_for(name: str, dtype: Any = np.float32, size: int = 8) -> dict[str, Array]:
    """Returns the required inputs of a variant; every axis has the same size."""
    random, inputs = np.random.default_rng(0), variants()[name].inputs.values()
    return {
        spec.name: random.normal(size=[fixed_size(x) or size for x in spec.letters]).astype(dtype)
        for spec in inputs
        if not spec.is_optional
    }


def encode_body(
    arrays: dict[str, Array], outputs: tuple[str, ...] = ("output",), **fields: Any
) -> Any:
    """Returns a body, and the number of bytes of its JSON."""
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    requested = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    chunks, length = open_inference.encode(
        Message({"outputs": requested} | fields, raw), "inputs", set(raw)
    )
    return b"".join(chunks), length


def encode_request(body: bytes, length: int, path: str = PATH, *lines: str) -> bytes:
    head = [
        f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}",
        f"{open_inference.LENGTH_HEADER}: {length}", *lines,
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class RawClient:
    """A client on a plain socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def read_response(self) -> tuple[dict[str, str], Any, bytes]:
        """Returns the headers of the next response, its JSON, and the bytes after the JSON."""
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, self._received = self._received.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        assert first == "HTTP/1.1 200 OK", head + self._received
        headers = dict(line.split(": ", 1) for line in lines)
        while len(self._received) < int(headers["content-length"]):
            self._more()
        body, self._received = (
            self._received[: (end := int(headers["content-length"]))],
            self._received[end:],
        )
        length = int(headers["inference-header-content-length"])
        return headers, json.loads(body[:length]), body[length:]

    def status(self) -> int:
        """Returns the status of the next response without consuming the response."""
        while b"\r\n\r\n" not in self._received:
            self._more()
        return int(self._received.split()[1])

    def header(self, name: str) -> str:
        """Returns a header of the next response without consuming the response."""
        self.status()
        head = self._received.partition(b"\r\n\r\n")[0]
        (value,) = re.findall(rf"(?im)^{name}: (.*?)\r?$", head.decode())
        return str(value)

    def body(self) -> bytes:
        """Returns the body of the next response, whose status must be 200."""
        assert self.status() == 200, self._received
        return self.rest()

    def rest(self) -> bytes:
        """Returns the body of the next response, with any status."""
        self.status()
        head, self._received = self._received.split(b"\r\n\r\n", 1)
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        while len(self._received) < length:
            self._more()
        body, self._received = self._received[:length], self._received[length:]
        return body

    def _more(self) -> None:
        more = self.socket.recv(1 << 20)
        assert more, "the connection was closed"
        self._received += more


@contextmanager
def raw_client(server: Server) -> Iterator[RawClient]:
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        yield RawClient(connection)


def in_flight_count(server: Server) -> int:
    """Returns the number of requests in flight."""
    return int(server.runtime.worker.shared_state.in_flight)


def read_responses(connection: socket.socket) -> list[tuple[int, dict[str, str], bytes]]:
    """Reads responses until the service closes the connection."""
    received = b""
    while more := connection.recv(1 << 20):
        received += more
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        size = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, received[:size]))
        received = received[size:]
    return found
