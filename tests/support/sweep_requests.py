"""Sweep requests, valid and invalid, and their events."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, Final

import pytest

from qkv.jobs.job import Job
from support.processes import TIMEOUT_S
from support.service import Server

SWEEP: Final = "/v1/sweep"
SMALL: Final = {"heads": 2, "width": 8, "repeats": 2}
CELL: Final = {
    "index", "variant", "parameters", "length", "median_ms", "least_ms", "most_ms", "repeats",
    "flops", "bytes", "peak_bytes",
}  # fmt: skip

Event = tuple[str, Any]


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Parses events by WHATWG's HTML, section 9.2.6."""
    name, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield name, json.loads("\n".join(data))
            name, data = "message", []
        elif not line.startswith(":"):
            field, _, value = line.partition(": ")
            assert field in ("event", "data"), line
            if field == "event":
                name = value
            else:
                data.append(value)
    assert not data, "the last event has no end"


def run_sweep(server: Server, **fields: Any) -> list[Event]:
    """Returns all events of a sweep."""
    with server.http.stream("POST", SWEEP, json=SMALL | fields) as response:
        assert response.status_code == 200, response.read()
        return list(parse_events(response.iter_lines()))


def open_sweep(server: Server, **fields: Any) -> socket.socket:
    """Returns a socket on which a sweep request has been sent."""
    body = json.dumps(SMALL | fields).encode()
    head = f"POST {SWEEP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(server.address)
    connection.settimeout(TIMEOUT_S)
    connection.sendall(head.encode() + body)
    return connection


@pytest.fixture
def submitted_jobs(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, int]]:
    """Returns the list that records every submitted job that is not small, and its priority."""
    jobs: list[tuple[Job, int]] = []
    submit = server.engine.submit

    def counting(job: Job, *, priority: int = 0, **how: Any) -> Any:
        if not job.plan.is_small:
            jobs.append((job, priority))
        return submit(job, priority=priority, **how)

    monkeypatch.setattr(server.engine, "submit", counting)
    return jobs
