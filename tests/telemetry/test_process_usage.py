"""`process_*` metrics: those of Prometheus's own client, for all processes of the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector

from qkv.telemetry.collector import process_families
from support.processes import TIMEOUT_S, Process, wait_until, wait_until_asleep
from support.service_processes import child_pids, status_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

SLEEP = """
import time
while time.process_time() < 0.1:  # the kernel counts in units of 10 ms
    pass
files = [open("/dev/null") for _ in range(7)]
time.sleep(600)
"""


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Starts two processes whose usage does not change; returns their ids."""
    started = [subprocess.Popen([sys.executable, "-c", SLEEP]) for _ in range(2)]
    pids = [each.pid for each in started]
    for pid in pids:
        wait_until(lambda pid=pid: len(os.listdir(f"/proc/{pid}/fd")) >= 10)  # type: ignore[misc]
        wait_until_asleep(pid)
    yield pids
    for each in started:
        each.kill()
        each.wait()


def collected(pid: int) -> dict[str, float]:
    """Returns the samples of Prometheus's client for a process, by name."""
    collector = ProcessCollector(pid=lambda: pid, registry=None)
    return {s.name: s.value for family in collector.collect() for s in family.samples}


def metrics(url: str) -> dict[str, float]:
    """Returns the metrics of a service that have one sample, by name."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}


def test_usage_of_several_processes_is_their_sum(sleepers: list[int]) -> None:
    first, second = map(collected, sleepers)
    families = process_families([*sleepers, 2**22 + 1])  # the last one does not exist
    found = {s.name: s.value for family in families for s in family.samples}
    assert found == {
        name: pytest.approx(value + second[name], rel=1e-12) for name, value in first.items()
    } | {
        "process_open_fds": max(first["process_open_fds"], second["process_open_fds"]),
        "process_max_fds": first["process_max_fds"],
        "process_start_time_seconds": min(
            first["process_start_time_seconds"], second["process_start_time_seconds"]
        ),
    }
    assert found["process_cpu_seconds_total"] > 0


def test_usage_without_the_first_process_is_unknown() -> None:
    assert process_families([2**22 + 1]) == []


def test_cpu_time_of_a_worker_that_has_exited_counts(command: Callable[..., Process]) -> None:
    service = command("serve", "--port", "0", "--workers", "2")
    before, url = metrics(service.url), service.url
    supervisor = collected(service.popen.pid)
    assert before["process_start_time_seconds"] == supervisor["process_start_time_seconds"]
    assert before["process_resident_memory_bytes"] > supervisor["process_resident_memory_bytes"]
    victim = child_pids(service.popen.pid)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: (
            len(pids := child_pids(service.popen.pid)) == 2
            and victim not in pids
            and status_of(url, "/readyz") == 200
        )
    )
    assert metrics(url)["process_cpu_seconds_total"] >= before["process_cpu_seconds_total"]
