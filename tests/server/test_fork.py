"""The supervisor leaves the driver of an accelerator alone: its forks need it as new."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.checked_forks import FORK_LOG, LOOK_FIRST, NOT_INITIALIZED, Fork, read_forks
from support.paths import ROOT
from support.processes import Process, killed_at_the_end, wait_until
from support.service_processes import child_pids, device_process_pid, status_of

pytestmark = pytest.mark.process

Serve = Callable[..., tuple[Process, Callable[[], list[Fork]]]]


@pytest.fixture
def serve_checked(tmp_path: Path) -> Iterator[Serve]:
    """Starts `qkv serve` with other arguments and environment; gives also its forks so far.

    By default as a user starts it: what a process has imported is checked.
    """
    log = tmp_path / "forks"
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {
        "QKV_DEVICE": "auto",
        "PYTHONPATH": os.pathsep.join(paths),
        FORK_LOG: str(log),
    }
    with ExitStack() as stack:

        def start(
            *arguments: str, is_forked: bool = False, **environment: str
        ) -> tuple[Process, Callable[[], list[Fork]]]:
            words = ("serve", "--port", "0", *arguments)
            service = stack.enter_context(
                killed_at_the_end(
                    Process(
                        words,
                        common | environment,
                        module="support.checked_forks",
                        is_forked=is_forked,
                    )
                )
            )
            assert service.url
            return service, lambda: read_forks(log, service.popen.pid)

        yield start


def replace(service: Process, victim: int) -> None:
    """Kills a process of the service; waits until the supervisor has forked another one."""
    count = len(child_pids(service.popen.pid))
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: (
            len(now := child_pids(service.popen.pid)) == count
            and victim not in now
            and status_of(service.url, "/readyz") == 200
        )
    )


def test_driver_is_untouched_before_each_fork(serve_checked: Serve) -> None:
    """Each: the search for the device, two workers, the device process, and both kinds again."""
    service, forks = serve_checked("--workers", "2", QKV_DEVICE_PROCESS="one")
    assert len(forks()) == 4
    device_process = device_process_pid(service)
    workers = set(child_pids(service.popen.pid)) - {device_process}
    replace(service, min(workers))
    replace(service, device_process)
    assert service.end() == 0
    assert len(forks()) == 6
    for fork in forks():
        assert fork.calls == []
        assert fork.modules == []
        assert fork.driver in (None, NOT_INITIALIZED)


def test_check_finds_a_supervisor_that_looks_for_the_device(serve_checked: Serve) -> None:
    service, forks = serve_checked(
        "--workers", "1", is_forked=True, QKV_DEVICE="cpu", **{LOOK_FIRST: "yes"}
    )
    assert service.end() == 0
    assert len(forks()) == 2
    assert all("torch.accelerator.current_accelerator" in fork.calls for fork in forks())
