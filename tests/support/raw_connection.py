"""A plain connection to a service, and requests that may take the shortest way."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from conftest import PATIENCE, Server
from qkv.attention.catalogue import fixed_size, variants
from qkv.engine.engine import Engine
from qkv.engine.executor import Standing
from qkv.tensors import RawTensor
from qkv.wire import open_inference as v2
from qkv.wire.message import Message
from support.known_requests import Array

PATH: Final = "/v2/models/softmax/infer"
NAMES: Final = ("query", "key", "value")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Standing]:
    """What has taken the shortest way."""
    taken: list[Standing] = []
    run_standing = Engine.run_standing

    def counted(engine: Engine, standing: Standing) -> Any:
        answer = run_standing(engine, standing)
        if answer is not None:
            taken.append(standing)
        return answer

    monkeypatch.setattr(Engine, "run_standing", counted)
    return taken


def drawn(seed: int, shape: tuple[int, ...] = (1, 2, 8, 16), dtype: Any = np.float32) -> Any:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name in NAMES}


def inputs_of(name: str, dtype: Any = np.float32, size: int = 8) -> dict[str, Array]:
    """What a variant needs, every axis of one size."""
    random, inputs = np.random.default_rng(0), variants()[name].inputs.values()
    return {
        spec.name: random.normal(size=[fixed_size(x) or size for x in spec.letters]).astype(dtype)
        for spec in inputs
        if not spec.optional
    }


def body_of(arrays: dict[str, Array], outputs: tuple[str, ...] = ("output",), **fields: Any) -> Any:
    """A body, and the bytes of its JSON."""
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    asked = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    chunks, length = v2.encode(Message({"outputs": asked} | fields, raw), "inputs", set(raw))
    return b"".join(chunks), length


def request_of(body: bytes, length: int, path: str = PATH, *lines: str) -> bytes:
    head = [
        f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}",
        f"{v2.LENGTH_HEADER}: {length}", *lines,
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Caller:
    """A plain connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._came = b""

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def answer(self) -> tuple[dict[str, str], Any, bytes]:
        """Headers, JSON and the bytes behind it, of the next answer."""
        while b"\r\n\r\n" not in self._came:
            self._more()
        head, self._came = self._came.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        assert first == "HTTP/1.1 200 OK", head + self._came
        headers = dict(line.split(": ", 1) for line in lines)
        while len(self._came) < int(headers["content-length"]):
            self._more()
        body, self._came = (
            self._came[: (end := int(headers["content-length"]))],
            self._came[end:],
        )
        length = int(headers["inference-header-content-length"])
        return headers, json.loads(body[:length]), body[length:]

    def status(self) -> int:
        """That of the next answer, which stays."""
        while b"\r\n\r\n" not in self._came:
            self._more()
        return int(self._came.split()[1])

    def body(self) -> bytes:
        """That of the next answer, which is good."""
        assert self.status() == 200, self._came
        return self.rest()

    def rest(self) -> bytes:
        """That of the next answer, whatever it is."""
        self.status()
        head, self._came = self._came.split(b"\r\n\r\n", 1)
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        while len(self._came) < length:
            self._more()
        body, self._came = self._came[:length], self._came[length:]
        return body

    def _more(self) -> None:
        more = self.socket.recv(1 << 20)
        assert more, "the connection was closed"
        self._came += more


@contextmanager
def calling(server: Server) -> Iterator[Caller]:
    with socket.create_connection(server.address, PATIENCE) as connection:
        yield Caller(connection)


def asked_of(server: Server) -> int:
    """Requests that the service counts as not answered."""
    return int(server.app.state.protocol.keywords["worker"].fleet.asked)
