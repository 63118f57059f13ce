"""Device errors over real sockets: failing jobs, out of memory, fatal errors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job
from support import failing_device
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S
from support.small_requests import Serve, body, outputs, post


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = partial(Engine, launch=failing_device.failing)
    monkeypatch.setattr("qkv.api.app.Engine", engine)
    monkeypatch.setattr("qkv.api.app.new_device", lambda *_: failing_device.FailingDevice())
    failing_device.broken.clear()


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("number", [failing_device.POISON, failing_device.ENDING])
@pytest.mark.parametrize(
    "place", [pytest.param(0, marks=pytest.mark.slow), 17, pytest.param(31, marks=pytest.mark.slow)]
)
def test_failing_request_fails_alone(serve: Serve, place: int, number: float) -> None:
    server = serve(max_batch=32)
    bodies = [body(seed=seed) for seed in range(32)]
    alone = [outputs(post(server.url, content)) for content in bodies]
    bodies[place] = body(number)
    with ThreadPoolExecutor(32) as pool:
        with server.hold():
            futures = [pool.submit(post, server.url, content) for content in bodies]
            server.wait_until_queued(32)
        responses = [future.result(TIMEOUT_S) for future in futures]
    for i, (expected, response) in enumerate(zip(alone, responses, strict=True)):
        if i == place:
            assert response.status_code == 500
            assert "marked" not in response.text
        else:
            assert outputs(response) == expected
    assert server.engine.is_alive
    assert post(server.url, body()).is_success


@pytest.mark.slow
def test_out_of_memory_halves_batches_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory halves batches; every queued request still gets its response."""
    monkeypatch.setattr("qkv.api.app.Engine", partial(Engine, batch_bytes=64 << 20))
    sizes: list[int] = []
    room = [4 << 20]

    def tight(jobs: Sequence[Job], *how: Any) -> Launched:
        size = sum(job.plan.bytes_in + job.plan.bytes_out for job in jobs)
        if size > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        sizes.append(len(jobs))
        return launch(jobs, *how)

    def greedy(*_: Any) -> Launched:
        torch.empty(1 << 60, dtype=torch.uint8)
        raise AssertionError

    server = serve(max_batch=32)
    server.engine.batch_runner.launch = tight
    content = body(rows=1, width=1 << 16)  # 1 MiB with its response

    def wave() -> list[int]:
        sizes.clear()
        with ThreadPoolExecutor(16) as pool:
            with server.hold():
                futures = [pool.submit(post, server.url, content) for _ in range(16)]
                server.wait_until_queued(16)
            assert all(future.result(TIMEOUT_S).is_success for future in futures)
        return list(sizes)

    assert wave() == [4, 4, 4, 4]
    room[0] = 64 << 20
    assert max(wave()) < 16  # the budget recovers slowly
    for _ in range(20):
        last = wave()
    assert last == [16]
    room[0] = 0
    assert_problem(post(server.url, content), 503)
    server.engine.batch_runner.launch = greedy
    assert "memory" in assert_problem(post(server.url, content), 413)["detail"]
    assert server.engine.is_alive


@pytest.mark.usefixtures("faults")
def test_after_a_fatal_error_all_requests_get_503_and_readyz_fails(serve: Serve) -> None:
    server = serve(max_batch=4)
    assert server.http.get("/readyz").status_code == 200
    with ThreadPoolExecutor(12) as pool:
        with server.hold():
            futures = [pool.submit(post, server.url, body(failing_device.STICKY))]
            server.wait_until_queued(1)
            futures += [pool.submit(post, server.url, body(rows=2 + i % 3)) for i in range(11)]
            server.wait_until_queued(12)
        responses = [future.result(TIMEOUT_S) for future in futures]
    for response in responses:
        assert "the device has failed" in assert_problem(response, 503)["detail"]
        assert int(response.headers["retry-after"]) >= 1
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/livez").status_code == 200
    assert_problem(post(server.url, body()), 503)


@pytest.mark.usefixtures("faults")
def test_system_exit_on_the_event_loop_gets_500(serve: Serve) -> None:
    server = serve()
    for _ in range(3):
        response = post(server.url, body(failing_device.ENDING))
        assert response.status_code == 500
        assert "marked" not in response.text
        assert post(server.url, body()).is_success
