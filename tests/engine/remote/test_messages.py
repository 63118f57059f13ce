"""Messages between a worker and the device process."""

from __future__ import annotations

from dataclasses import asdict

from qkv.engine.remote.messages import (
    NO_DEADLINE,
    JobRequest,
    pack_id,
    pack_result,
    pack_results,
    unpack_id,
    unpack_results,
)
from qkv.jobs.result import Result
from qkv.jobs.tenant import ANYONE, Tenant
from qkv.telemetry.times import Times


def test_job_requests_unpack_as_packed() -> None:
    requests = [
        JobRequest(1 << 40, 64, 1 << 40, 255, 123.456, deadline, tenant, plan)
        for deadline, tenant, plan in (
            (NO_DEADLINE, ANYONE, b""),
            (0.0, Tenant("a" * 64, 0.25), b"plan" * 999),
            (1.5, Tenant("b"), b"1"),
        )
    ]
    for count in range(4):
        payload = b"".join(request.pack() for request in requests[:count])
        assert JobRequest.unpack_all(payload) == requests[:count]


def test_results_unpack_as_packed() -> None:
    for backend in ("", "explicit", "\N{GREEK SMALL LETTER MU}"):
        notes = (backend, "a note") if backend else ()
        results = [
            Result({}, Times(0.1, 0.2, 0.3, number, 0.5), backend, 64, device="cuda:0", notes=notes)
            for number in range(3)
        ]
        packed = [pack_result(number, result) for number, result in enumerate(results)]
        found = unpack_results(pack_results(backend, notes, packed), "cuda:0")
        assert [(number, asdict(result)) for number, result in found] == [
            (number, asdict(result)) for number, result in enumerate(results)
        ]


def test_id_unpacks_as_packed() -> None:
    assert unpack_id(pack_id(1 << 63) + b"text") == (1 << 63, b"text")
