"""SharedState and WorkerState: state that processes share, and the usable CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from qkv.server.process import usable_cpus
from qkv.telemetry.worker_state import SharedState


def in_a_fork(function: Callable[[], object]) -> None:
    """Runs a function in a forked process, and waits for its end."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_service_is_ready_when_every_worker_is() -> None:
    shared_state = SharedState(3)
    workers = [shared_state.worker(index) for index in range(3)]
    assert len(shared_state) == 3
    for worker in workers:
        assert not shared_state.is_ready
        in_a_fork(lambda worker=worker: worker.set_ready(True))  # type: ignore[misc]
    assert shared_state.is_ready
    in_a_fork(lambda: workers[1].set_ready(False))
    assert not shared_state.is_ready


def test_restarted_worker_has_a_cleared_row() -> None:
    shared_state = SharedState(2, stuck_s=1e-6, stuck_device_s=1e-6)
    for index in range(2):
        worker = shared_state.worker(index)
        in_a_fork(
            lambda worker=worker: (  # type: ignore[misc]
                worker.set_ready(True),
                worker.record_heartbeat(),
                worker.set_busy(True),
            )
        )
    time.sleep(0.001)
    assert (shared_state.is_ready, shared_state.stuck_processes) == (True, [0, 1])
    shared_state.worker(0)
    assert (shared_state.is_ready, shared_state.stuck_processes) == (False, [1])


def test_drain_reaches_every_process_and_ends_readiness() -> None:
    shared_state = SharedState(1)
    shared_state.worker(0).set_ready(True)
    assert (shared_state.is_ready, shared_state.is_draining) == (True, False)
    in_a_fork(shared_state.drain)
    assert (shared_state.is_ready, shared_state.is_draining) == (False, True)


@pytest.mark.slow
def test_process_that_has_not_started_is_not_stuck() -> None:
    shared_state = SharedState(2, stuck_s=1e-9, stuck_device_s=1e-9)
    time.sleep(0.001)
    assert shared_state.stuck_processes == []


@pytest.mark.parametrize(("loop_s", "device_s", "stuck"), [(0.05, 60, [1]), (60, 0.05, [2])])
def test_silent_event_loop_and_stuck_device_are_distinguished(
    loop_s: float, device_s: float, stuck: list[int]
) -> None:
    shared_state = SharedState(3, loop_s, device_s)
    workers = [shared_state.worker(index) for index in range(3)]
    in_a_fork(workers[1].record_heartbeat)
    in_a_fork(lambda: workers[2].set_busy(True))
    time.sleep(0.06)
    assert shared_state.stuck_processes == stuck
    in_a_fork(lambda: workers[2].set_busy(False))
    in_a_fork(lambda: workers[1].record_heartbeat())
    assert 2 not in shared_state.stuck_processes


def test_usable_cpus_follow_affinity() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= usable_cpus() <= allowed
    cpu = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, [{cpu}]);"
        "from qkv.server.process import usable_cpus; assert usable_cpus() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 2), ("1000000 100000", 8)],
)
def test_usable_cpus_follow_the_cgroup_quota(
    quota: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    file = os.path.join(tmp_path, "cpu.max")
    with open(file, "w") as stream:
        stream.write(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("builtins.open", lambda _, open=open: open(file))
    assert usable_cpus() == expected


def test_threads_are_idle_while_at_most_one_request_is_in_flight() -> None:
    shared_state = SharedState(3)
    workers = [shared_state.worker(index) for index in range(3)]
    assert [worker.idle_threads() for worker in workers] == [3, 3, 3]
    workers[0].add_in_flight(1)
    assert workers[0].idle_threads() == 3
    workers[2].add_in_flight(1)
    assert workers[0].idle_threads() == workers[2].idle_threads() == 1
    shared_state.worker(2)  # it was killed; its requests no longer count
    assert workers[0].idle_threads() == 3
    workers[0].add_in_flight(-1)
    assert shared_state.in_flight == 0


def test_has_less_loaded_peer_compares_connections_of_ready_workers() -> None:
    shared_state = SharedState(2)
    one, other = (shared_state.worker(index) for index in range(2))
    both = (one, other)
    one.set_connection_count(1)
    assert [w.has_less_loaded_peer for w in both] == [False, False]  # the other worker is not ready
    other.set_ready(True)
    assert [w.has_less_loaded_peer for w in both] == [True, False]
    other.set_connection_count(1)
    assert [w.has_less_loaded_peer for w in both] == [False, False]
