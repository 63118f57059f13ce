"""Small requests for tests that send many, and a record of the executed jobs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv.client.request_builders import build_attend
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job
from support.processes import TIMEOUT_S
from support.service import Server

PATH: Final = "/v1/attention/softmax"
SAFETENSORS: Final = {"Content-Type": "application/vnd.safetensors"}
INFER: Final = "/v2/models/softmax/infer"
HEAD: Final = "POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\n"
Serve = Callable[..., Server]


def body(first: float = 1.0, rows: int = 2, width: int = 4, seed: int = 0) -> bytes:
    draw, shape = np.random.default_rng(seed), (1, 1, rows, width)
    arrays = {n: draw.normal(size=shape).astype(np.float32) for n in ("query", "key", "value")}
    arrays["query"][0, 0, 0, 0] = first
    return build_attend("softmax", None, ["output"], "none", arrays).content


def post(url: str, content: bytes, **headers: str) -> httpx.Response:
    sent = SAFETENSORS | headers
    return httpx.post(url + PATH, content=content, headers=sent, timeout=TIMEOUT_S)


def outputs(response: httpx.Response) -> bytes:
    """Returns the bytes of the output, the last of the response."""
    assert response.status_code == 200, response.text
    return response.content[-32:]


@contextmanager
def open_connection(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, TIMEOUT_S) as connection:
        yield connection


def read_head(connection: socket.socket) -> str:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, "the connection closed without a response"
        received += piece
    return received.decode("latin-1")


@pytest.fixture
def executed_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Returns a list to which every executed job is appended."""
    every: list[Job] = []

    def recorded(jobs: Sequence[Job], *how: Any) -> Launched:
        every.extend(jobs)
        return launch(jobs, *how)

    monkeypatch.setattr("qkv.api.app.Engine", partial(Engine, launch=recorded))
    return every
