"""Messages between a worker and the device process."""

from __future__ import annotations

from qkv.engine.remote.messages import (
    NO_DEADLINE,
    JobRequest,
    JobTimes,
    pack_id,
    pack_results,
    pack_times,
    unpack_id,
    unpack_results,
)


def test_job_requests_unpack_as_packed() -> None:
    requests = [
        JobRequest(1 << 40, 64, 1 << 40, 255, 123.456, deadline, plan)
        for deadline, plan in ((NO_DEADLINE, b""), (0.0, b"plan" * 999), (1.5, b"1"))
    ]
    for count in range(4):
        payload = b"".join(request.pack() for request in requests[:count])
        assert JobRequest.unpack_all(payload) == requests[:count]


def test_results_unpack_as_packed() -> None:
    times = [JobTimes(n, 0.1, 0.2, 0.3, 0.4, 64) for n in range(3)]
    for backend in ("", "explicit", "\N{GREEK SMALL LETTER MU}"):
        payload = pack_results(backend, [pack_times(each.id, each._asdict()) for each in times])
        assert unpack_results(payload) == (backend, times)


def test_id_unpacks_as_packed() -> None:
    assert unpack_id(pack_id(1 << 63) + b"text") == (1 << 63, b"text")
