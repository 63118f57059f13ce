"""Several workers and one device process: real processes, sockets and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from qkv.api.openapi.document import EXAMPLES
from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.client.request_builders import build_attend
from qkv.engine.remote.shared_memory import RETAINED_BYTES
from support.failing_device import WAITING
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import child_pids, device_process_pid, status_of
from support.small_requests import body, post

Start = Callable[..., Process]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Returns the file that exists while the device waits."""
    return tmp_path / "gate"


@pytest.fixture
def start(command: Start, gate: Path) -> Start:
    """Starts a service whose device waits on request."""

    def started(workers: int, **environment: str) -> Process:
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        tests = {"PYTHONPATH": os.pathsep.join(paths), "GATE": str(gate)}
        words = ("serve", "--port", "0", "--workers", str(workers))
        environment = {"QKV_DEVICE_PROCESS": "one"} | tests | environment
        process = command(*words, module="support.faulty_service", **environment)
        assert process.url
        return process

    return started


@pytest.fixture(scope="module")
def shared(shared_process: Callable[..., Process]) -> Process:
    return shared_process("--workers", "2", QKV_DEVICE_PROCESS="one")


def outputs(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    reply = response.json()
    assert list(reply.pop("timing"))
    return reply


@pytest.mark.representative
@pytest.mark.parametrize("variant", list(variants().values()), ids=lambda v: v.name)
def test_responses_equal_those_without_a_device_process(
    shared_process: Start, variant: Variant, shared: Process
) -> None:
    """Compares the examples of every variant, with layers and gradients."""
    without = shared_process("--workers", "1")
    for kind, verb in (("attention", "attend"), ("gradients", "gradients")):
        if kind == "gradients" and variant.backward is None:
            continue
        for request in EXAMPLES[f"{verb}_{variant.name}"]["request"].values():
            there, here = (
                httpx.post(f"{p.url}/v1/{kind}/{variant.name}", json=request["value"])
                for p in (shared, without)
            )
            assert outputs(there) == outputs(here)
            assert list(there.json()["timing"]) == list(here.json()["timing"])


def test_one_process_has_the_device(shared: Process) -> None:
    assert len(child_pids(shared.popen.pid)) == 2 + 1
    assert device_process_pid(shared) in child_pids(shared.popen.pid)
    config = httpx.get(f"{shared.url}/v2/models/softmax/config").json()
    assert config["instance_group"][0]["count"] == 1


def test_memory_of_a_killed_worker_is_free_again(start: Start, gate: Path) -> None:
    """Its region fits one such request; the worker that replaces it gets the request again."""
    service_process = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20))
    large = {"rows": 256, "width": 2048}  # 6 MiB in, 2 MiB out
    device = device_process_pid(service_process)
    (worker,) = set(child_pids(service_process.popen.pid)) - {device}
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(post, service_process.url, body(WAITING, **large))
        wait_until(gate.exists)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            lost.result(TIMEOUT_S)
    gate.unlink()
    wait_until(lambda: worker not in child_pids(service_process.popen.pid))
    wait_until(lambda: status_of(service_process.url, "/readyz") == 200)
    assert device_process_pid(service_process) == device
    assert post(service_process.url, body(**large)).is_success
    assert service_process.end() == 0


def test_memory_of_a_large_request_returns_to_the_system(shared: Process) -> None:
    sizes = {"query": 1, "key": 150_000, "value": 150_000}
    arrays: dict[str, Any] = {n: np.ones((1, 1, L, 64), np.float32) for n, L in sizes.items()}
    content = build_attend("softmax", None, ["output"], "none", arrays).content
    kept = (RETAINED_BYTES >> 20) + 4  # of its worker; the other one has had small requests
    assert len(content) >> 20 > kept

    def shared_memory() -> int:
        """Returns MiB of the process that has most."""
        return max(
            int(line.split()[1]) >> 10
            for pid in child_pids(shared.popen.pid)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("RssShmem")
        )

    assert post(shared.url, content).is_success
    wait_until(lambda: shared_memory() <= kept)
