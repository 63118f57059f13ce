"""SharedState and WorkerState: state that processes share, and the usable CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from qkv.server.process import usable_cpus
from qkv.telemetry.worker_state import SharedState, WorkerState


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


def test_service_is_ready_while_one_device_process_is() -> None:
    shared_state = SharedState(2, devices=["cuda:0", "cuda:1"])
    one, other, *devices = (shared_state.worker(index) for index in shared_state.processes)
    for worker in (one, other):
        worker.set_ready(True)
    assert (shared_state.is_ready, shared_state.is_complete) == (False, False)
    in_a_fork(lambda: devices[1].set_ready(True))
    assert (shared_state.is_ready, shared_state.is_complete) == (True, False)
    in_a_fork(lambda: devices[0].set_ready(True))
    assert (shared_state.is_ready, shared_state.is_complete) == (True, True)
    one.set_ready(False)
    assert (shared_state.is_ready, shared_state.is_complete) == (False, False)


def use(worker: WorkerState, total_bytes: int) -> None:
    worker.set_queue((1, 2, 0))
    worker.set_memory((3, 4, total_bytes))


def used(shared_state: SharedState) -> list[float]:
    names = ("queue_depth", "queue_bytes", "memory_allocated", "memory_reserved")
    totals = [float(shared_state.counters.total(name)) for name in names]
    return [*totals, shared_state.device_memory_bytes]


def test_memory_of_devices_is_a_sum_and_processes_of_one_device_share_its_total() -> None:
    shared_state = SharedState(1, devices=["cuda:0", "cuda:1", "cuda:0"])
    for number, total in enumerate((10, 7, 10)):
        use(shared_state.worker(1 + number), total)
    assert used(shared_state) == [3, 6, 9, 12, 17]
    shared_state = SharedState(3)  # each uses the same device
    for number in range(3):
        use(shared_state.worker(number), 10)
    assert used(shared_state) == [3, 6, 9, 12, 10]


def test_restarts_of_device_processes_are_counted() -> None:
    shared_state = SharedState(1, devices=["cpu", "cpu"])
    assert shared_state.device_restarts == [0, 0]
    for index in (0, 1, 2, 2, 2, 0):
        shared_state.worker(index)
    assert shared_state.device_restarts == [0, 2]


def test_queued_work_is_the_sum_of_all_workers_and_that_of_an_exited_one_is_cleared() -> None:
    shared_state = SharedState(2, devices=["cpu", "cpu", "cpu"])
    for worker, work in ((0, (1.0, 2.0, 3.0)), (1, (10.0, 20.0, 2.0**60))):

        def write(worker: int = worker, work: tuple[float, ...] = work) -> None:
            for number, each in enumerate(work):
                shared_state.set_queued_work(worker, number, each)

        in_a_fork(write)
    assert shared_state.queued_work == [11.0, 22.0, 3.0 + 2.0**60]
    shared_state.clear_row(2)  # of a device process
    assert shared_state.queued_work == [11.0, 22.0, 3.0 + 2.0**60]
    shared_state.clear_row(1)
    assert shared_state.queued_work == [1.0, 2.0, 3.0]


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


def test_process_that_has_not_started_is_not_stuck() -> None:
    shared_state = SharedState(2, stuck_s=0.0, stuck_device_s=0.0)
    assert shared_state.stuck_processes == []


@pytest.mark.slow
def test_process_that_is_replaced_is_at_no_moment_stuck() -> None:
    shared_state = SharedState(1, stuck_s=10.0, stuck_device_s=10.0)
    worker = shared_state.worker(0)
    if not (replaced := os.fork()):
        while True:
            worker.record_heartbeat()
            worker.set_busy(True)
            shared_state.clear_row(0)
    try:
        assert all(shared_state.stuck_processes == [] for _ in range(100_000))
    finally:
        os.kill(replaced, signal.SIGKILL)
        os.waitpid(replaced, 0)


@pytest.mark.parametrize(("loop_s", "device_s", "stuck"), [(5, 60, [1]), (60, 5, [2])])
def test_silent_event_loop_and_stuck_device_are_distinguished(
    monkeypatch: pytest.MonkeyPatch, loop_s: float, device_s: float, stuck: list[int]
) -> None:
    now = [100.0]
    # private: with the real clock, the test would wait, and fail on a busy machine
    monkeypatch.setattr("qkv.telemetry.worker_state._now", lambda: now[0])
    shared_state = SharedState(3, loop_s, device_s)
    workers = [shared_state.worker(index) for index in range(3)]
    in_a_fork(workers[1].record_heartbeat)
    in_a_fork(lambda: workers[2].set_busy(True))
    assert shared_state.stuck_processes == []
    now[0] += 6
    assert shared_state.stuck_processes == stuck
    in_a_fork(lambda: workers[2].set_busy(False))
    in_a_fork(lambda: workers[1].record_heartbeat())
    assert shared_state.stuck_processes == []


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
