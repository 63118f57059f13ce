"""The memory that worker processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from qkv.server.cpus import usable_cpus
from qkv.telemetry.worker_state import Fleet


def in_a_fork(does: Callable[[], object]) -> None:
    """Runs it in a child process to its end."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            does()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fleet_is_ready_when_every_worker_is() -> None:
    fleet = Fleet(3)
    workers = [fleet.worker(index) for index in range(3)]
    assert len(fleet) == 3
    for worker in workers:
        assert not fleet.ready
        in_a_fork(lambda worker=worker: worker.ready(True))  # type: ignore[misc]
    assert fleet.ready
    in_a_fork(lambda: workers[1].ready(False))
    assert not fleet.ready


def test_a_worker_started_anew_has_nothing_of_the_one_before() -> None:
    fleet = Fleet(2, stuck_s=1e-6, stuck_device_s=1e-6)
    for index in range(2):
        worker = fleet.worker(index)
        in_a_fork(lambda worker=worker: (worker.ready(True), worker.beat(), worker.busy(True)))  # type: ignore[misc]
    time.sleep(0.001)
    assert (fleet.ready, fleet.stuck) == (True, [0, 1])
    fleet.worker(0)
    assert (fleet.ready, fleet.stuck) == (False, [1])


def test_draining_reaches_every_process_and_none_is_ready() -> None:
    fleet = Fleet(1)
    fleet.worker(0).ready(True)
    assert (fleet.ready, fleet.draining) == (True, False)
    in_a_fork(fleet.drain)
    assert (fleet.ready, fleet.draining) == (False, True)


def test_who_has_not_started_is_not_stuck() -> None:
    fleet = Fleet(2, stuck_s=1e-9, stuck_device_s=1e-9)
    time.sleep(0.001)
    assert fleet.stuck == []


@pytest.mark.parametrize(("loop_s", "device_s", "stuck"), [(0.05, 60, [1]), (60, 0.05, [2])])
def test_a_silent_loop_and_a_busy_device_are_told_apart(
    loop_s: float, device_s: float, stuck: list[int]
) -> None:
    fleet = Fleet(3, loop_s, device_s)
    workers = [fleet.worker(index) for index in range(3)]
    in_a_fork(workers[1].beat)
    in_a_fork(lambda: workers[2].busy(True))
    time.sleep(0.06)
    assert fleet.stuck == stuck
    in_a_fork(lambda: workers[2].busy(False))
    in_a_fork(lambda: workers[1].beat())
    assert 2 not in fleet.stuck


def test_it_has_a_worker_for_each_cpu_that_it_may_use() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= usable_cpus() <= allowed
    cpu = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, [{cpu}]);"
        "from qkv.server.cpus import usable_cpus; assert usable_cpus() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 2), ("1000000 100000", 8)],
)
def test_the_cgroups_quota_counts(
    quota: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    file = os.path.join(tmp_path, "cpu.max")
    with open(file, "w") as stream:
        stream.write(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("builtins.open", lambda _, open=open: open(file))
    assert usable_cpus() == expected


def test_threads_are_spare_while_one_request_is_there_and_no_other() -> None:
    fleet = Fleet(3)
    workers = [fleet.worker(index) for index in range(3)]
    assert [worker.spare() for worker in workers] == [3, 3, 3]
    workers[0].asks(1)
    assert workers[0].spare() == 3
    workers[2].asks(1)
    assert workers[0].spare() == workers[2].spare() == 1
    fleet.worker(2)  # it was killed, and what it was asked is gone with it
    assert workers[0].spare() == 3
    workers[0].asks(-1)
    assert fleet.asked == 0


def test_who_has_more_connections_than_another_that_takes_requests() -> None:
    fleet = Fleet(2)
    one, other = (fleet.worker(index) for index in range(2))
    both = (one, other)
    one.connections(1)
    assert [w.has_more_than_others for w in both] == [False, False]  # the other takes none
    other.ready(True)
    assert [w.has_more_than_others for w in both] == [True, False]
    other.connections(1)
    assert [w.has_more_than_others for w in both] == [False, False]
