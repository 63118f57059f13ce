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
    head = f"POST {SWEEP} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection(server.address)
    connection.settimeout(TIMEOUT_S)
    connection.sendall(head + body)
    return connection


@pytest.fixture
def submitted_jobs(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, int]]:
    """Returns the list that records every submitted job and its priority."""
    jobs: list[tuple[Job, int]] = []
    submit = server.engine.submit

    def counting(job: Job, *, priority: int = 0, **how: Any) -> Any:
        jobs.append((job, priority))
        return submit(job, priority=priority, **how)

    monkeypatch.setattr(server.engine, "submit", counting)
    return jobs


REFUSED: Final[list[tuple[int, str, dict[str, Any]]]] = [
    (422, "/variants", {"variants": []}),
    (422, "/variants", {"variants": None}),
    (422, "/variants", {"variants": ["mean"] * 17}),
    (404, "/variants/0", {"variants": ["sotfmax"]}),
    (422, "/variants/0", {"variants": ["linear_layer"]}),
    (422, "/variants/1/parameters/scale", {
        "variants": ["mean", {"variant": "taylor", "parameters": {"scale": 2}}],
    }),
    (422, "/variants/0/params", {"variants": [{"variant": "mean", "params": {}}]}),
    (422, "/lengths", {"lengths": []}),
    (422, "/lengths", {"lengths": list(range(1, 66))}),
    (422, "/lengths/1", {"lengths": [8, 8]}),
    (422, "/lengths/1", {"lengths": [8, 0]}),
    (422, "/lengths/0", {"lengths": [(1 << 20) + 1]}),
    (422, "/lengths/0", {"lengths": [8.5]}),
    (422, "/lengths/0", {"lengths": [True]}),
    (422, "/repeats", {"repeats": 0}),
    (422, "/repeats", {"repeats": 101}),
    (422, "/batch", {"batch": 0}),
    (422, "/heads", {"heads": 4097}),
    (422, "/width", {"width": "64"}),
    (422, "/dtype", {"dtype": "int64"}),
    (422, "/seed", {"seed": -1}),
    (422, "/seed", {"seed": 1 << 63}),
    (422, "/inputs", {"inputs": {}}),
]  # fmt: skip
