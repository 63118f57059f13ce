"""Several workers and one device process: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import qkv
from qkv.api.openapi.document import EXAMPLES
from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.client.request_builders import build_attend
from qkv.engine.remote.shared_memory import RETAINED_BYTES
from support import small_requests
from support.failing_device import WAITING
from support.known_requests import assert_problem, random_case
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import (
    child_pids,
    device_process_pid,
    status_of,
)

WORKERS: Final = 3
PATH: Final = "/v1/attention/softmax"
JSON: Final = {"Content-Type": "application/json"}
SAFETENSORS: Final = {"Content-Type": "application/vnd.safetensors"}
Start = Callable[..., Process]


def starter(command: Start, **words: str) -> Start:
    """Returns a function that starts the service, of another module and with other variables."""

    def started(workers: int = WORKERS, **environment: str) -> Process:
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        tests = {"PYTHONPATH": os.pathsep.join(paths)}
        environment = {"QKV_DEVICE_PROCESS": "one"} | tests | environment
        arguments = ("serve", "--port", "0", "--workers", str(workers))
        process = command(*arguments, **words | environment)
        assert process.url
        return process

    return started


@pytest.fixture
def start(command: Start) -> Start:
    """Starts the service on the CPU."""
    return starter(command)


@pytest.fixture(params=["cpu", "pretended"])
def start_any(command: Start, request: pytest.FixtureRequest) -> Start:
    """Starts the service on the CPU, and on a pretended accelerator.

    Long sequences run on the CPU only: on the other, scores take memory for each pair.
    """
    return starter(command, module="support.faulty_service", DEVICE=request.param)


@pytest.fixture
def service_process(start: Start) -> Process:
    return start()


def random_arrays(seed: int, length: int = 64, heads: int = 4) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shape = (1, heads, length, 16)
    return {n: draw.normal(size=shape).astype(np.float32) for n in ("query", "key", "value")}


def body(length: int, heads: int = 4) -> bytes:
    return build_attend(
        "softmax", None, ["output"], "none", random_arrays(0, length, heads)
    ).content


def statistics(service_process: Process) -> dict[str, Any]:
    (found,) = httpx.get(f"{service_process.url}/v2/models/softmax/stats").json()["model_stats"]
    return dict(found)


def outputs(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    reply = response.json()
    assert list(reply.pop("timing"))
    return reply


def test_one_additional_process_only_if_set(start: Start) -> None:
    service_process = start()
    assert len(child_pids(service_process.popen.pid)) == WORKERS + 1
    assert device_process_pid(service_process) in child_pids(service_process.popen.pid)
    assert [status_of(service_process.url, p) for p in ("/readyz", "/livez")] == [200, 200]
    config = httpx.get(f"{service_process.url}/v2/models/softmax/config").json()
    assert config["instance_group"][0]["count"] == 1
    for choice in ("auto", "each"):
        assert len(child_pids(start(2, QKV_DEVICE_PROCESS=choice).popen.pid)) == 2
    assert service_process.end() == 0


@pytest.mark.representative
@pytest.mark.parametrize("variant", list(variants().values()), ids=lambda v: v.name)
def test_responses_equal_those_without_a_device_process(
    process: Process, variant: Variant, shared: Process
) -> None:
    """Compares the examples of every variant, with layers and gradients."""
    for kind, verb in (("attention", "attend"), ("gradients", "gradients")):
        if kind == "gradients" and variant.backward is None:
            continue
        for request in EXAMPLES[f"{verb}_{variant.name}"]["request"].values():
            there, here = (
                httpx.post(f"{p.url}/v1/{kind}/{variant.name}", json=request["value"])
                for p in (shared, process)
            )
            assert outputs(there) == outputs(here)
            assert list(there.json()["timing"]) == list(here.json()["timing"])


@pytest.fixture(scope="module")
def shared(shared_process: Callable[..., Process]) -> Process:
    return shared_process("--workers", "2", QKV_DEVICE_PROCESS="one")


@pytest.mark.representative
def test_softmax_responses_equal_those_without_a_device_process(
    process: Process, shared: Process
) -> None:
    with httpx.Client() as client:
        for kind in range(40):
            content = json.dumps(random_case(kind, 0).document)
            one, other = (
                client.post(p.url + PATH, content=content, headers=JSON) for p in (shared, process)
            )
            assert outputs(one) == outputs(other)
        wrong: list[Any] = [{"inputs": {}}, {"inputs": {"query": [[1]]}, "nope": 1}]
        for document in wrong:
            one, other = (client.post(p.url + PATH, json=document) for p in (shared, process))
            assert assert_problem(one) == assert_problem(other)


def test_batches_form_across_workers(start_any: Start) -> None:
    """Queues more jobs than one worker has connections, while the device process is stopped.

    After the stop it may run the jobs of one worker before it reads the others; then the test
    repeats.
    """
    service_process = start_any(QKV_MAX_BATCH="16")
    arrays = [random_arrays(seed) for seed in range(12)]
    with ExitStack() as stack:
        clients = [stack.enter_context(qkv.Client(service_process.url)) for _ in arrays]
        expected = [
            c.attend("softmax", **a).output for c, a in zip(clients, arrays, strict=True)
        ]  # each client has a connection
        pool = stack.enter_context(ThreadPoolExecutor(len(arrays)))
        largest = 0

        def run_while_stopped() -> None:
            nonlocal largest
            before = statistics(service_process)
            device = device_process_pid(service_process)
            os.kill(device, signal.SIGSTOP)
            runs = [
                pool.submit(c.attend, "softmax", **a) for c, a in zip(clients, arrays, strict=True)
            ]
            time.sleep(1)
            assert not any(run.done() for run in runs)
            os.kill(device, signal.SIGCONT)
            found = [run.result(TIMEOUT_S) for run in runs]
            for run, output in zip(found, expected, strict=True):
                assert (run.output == output).all()
            largest = max(run.timing["batch_size"] for run in found)
            assert min(run.timing["queue_ms"] for run in found) > 100
            after = statistics(service_process)
            assert after["inference_count"] - before["inference_count"] == 12
            assert after["execution_count"] - before["execution_count"] < 12

        for _ in range(10):
            run_while_stopped()
            if largest > len(arrays) / WORKERS + 1:
                return
        raise AssertionError(f"no batch of more than {largest}")


def test_memory_of_a_killed_worker_is_free_again(start: Start) -> None:
    """Its region fits one such request; the worker that replaces it gets the request again."""
    content = body(32768, 1)  # 6 MiB in, 2 MiB out
    service_process = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20))
    expected = httpx.post(service_process.url + PATH, content=body(64), headers=SAFETENSORS).content
    for _ in range(2):
        time.sleep(1.1)
        device = device_process_pid(service_process)
        (worker,) = set(child_pids(service_process.popen.pid)) - {device}
        with httpx.Client(timeout=TIMEOUT_S) as client, ThreadPoolExecutor(1) as pool:
            future = pool.submit(
                client.post, service_process.url + PATH, content=content, headers=SAFETENSORS
            )
            time.sleep(0.3)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                future.result(TIMEOUT_S)
        wait_until(lambda worker=worker: worker not in child_pids(service_process.popen.pid))  # type: ignore[misc]
        wait_until(lambda: status_of(service_process.url, "/readyz") == 200)
        assert device_process_pid(service_process) == device
    again = httpx.post(service_process.url + PATH, content=body(64), headers=SAFETENSORS).content
    assert again.partition(b"timing")[0] == expected.partition(b"timing")[0]
    assert again[-4096:] == expected[-4096:]
    assert service_process.end() == 0


def test_job_whose_time_is_over_before_the_device_is_free_does_not_run(
    command: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    # without batches, small jobs are not queued
    start = starter(command, module="support.faulty_service", GATE=str(gate), QKV_MAX_BATCH="2")
    url = start().url
    late: dict[str, Any] = {"inputs": [], "parameters": {"timeout": 50_000}}
    for name, array in random_arrays(0, 8).items():
        tensor = {"name": name, "shape": list(array.shape), "datatype": "FP32"}
        late["inputs"].append(tensor | {"data": array.ravel().tolist()})
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(small_requests.post, url, small_requests.body(WAITING))
        wait_until(gate.exists)
        refusal = httpx.post(f"{url}/v2/models/softmax/infer", json=late, timeout=TIMEOUT_S)
        gate.unlink()
        assert busy.result(TIMEOUT_S).status_code == 200
    assert refusal.status_code == 503
    assert "50 ms" in refusal.text
    assert small_requests.post(url, small_requests.body()).status_code == 200
    (found,) = httpx.get(f"{url}/v2/models/softmax/stats").json()["model_stats"]
    assert found["inference_count"] == 2


def test_full_shared_memory_gets_503_until_blocks_are_released(start_any: Start) -> None:
    service_process = start_any(1, QKV_MAX_QUEUE_BYTES=str(8 << 20), QKV_MAX_BATCH="1")
    device, content = device_process_pid(service_process), body(4096)  # 3 MiB in, 1 MiB out
    os.kill(device, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:
        futures = [
            pool.submit(
                httpx.post,
                service_process.url + PATH,
                content=content,
                headers=SAFETENSORS,
                timeout=TIMEOUT_S,
            )
            for _ in range(6)
        ]
        wait_until(lambda: sum(a.done() for a in futures) == 4)
        assert status_of(service_process.url, "/livez") == 200
        os.kill(device, signal.SIGCONT)
        responses = [a.result(TIMEOUT_S) for a in futures]
    assert Counter(a.status_code for a in responses) == {200: 2, 503: 4}
    for response in responses:
        if response.status_code == 503:
            assert "bytes of tensors are queued" in assert_problem(response, 503)["detail"]
            assert int(response.headers["retry-after"]) > 0
    for _ in range(3):
        response = httpx.post(service_process.url + PATH, content=content, headers=SAFETENSORS)
        assert response.status_code == 200


def test_after_a_thousand_requests_the_largest_still_fits(start: Start) -> None:
    """Some clients disconnect early; then one request takes nearly all of the memory."""
    service_process = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20))
    contents = [body(n, 1) for n in (1, 5, 64, 500, 4096)]
    clients = [httpx.Client(timeout=TIMEOUT_S) for _ in range(4)]

    def some(index: int) -> set[int]:
        found = set()
        for i in range(250):
            content = contents[(i + index) % 5]
            try:
                wait_s = 0.002 if i % 25 == 0 else TIMEOUT_S
                response = clients[index].post(
                    service_process.url + PATH,
                    content=content,
                    headers=SAFETENSORS,
                    timeout=wait_s,
                )
                found.add(response.status_code)
            except httpx.TimeoutException:
                pass
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set[int]().union(*pool.map(some, range(4))) == {200}
    for client in clients:
        client.close()
    largest = httpx.post(
        service_process.url + PATH, content=body(32600, 1), headers=SAFETENSORS, timeout=TIMEOUT_S
    )
    assert largest.status_code == 200, largest.text


def test_memory_of_a_large_request_returns_to_the_system(process: Process, shared: Process) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        "query": draw.normal(size=(1, 1, 1, 64)).astype(np.float32),
        "key": draw.standard_normal((1, 1, 500_000, 64), np.float32),
        "value": draw.standard_normal((1, 1, 500_000, 64), np.float32),
    }
    content = build_attend("softmax", None, ["output"], "none", arrays).content
    assert 240 << 20 < len(content) < 256 << 20
    there, here = (
        httpx.post(p.url + PATH, content=content, headers=SAFETENSORS, timeout=TIMEOUT_S)
        for p in (shared, process)
    )
    assert there.status_code == here.status_code == 200
    assert there.content[-256:] == here.content[-256:]

    def shared_memory() -> int:
        """Returns MiB of the process that has most."""
        return max(
            int(line.split()[1]) >> 10
            for pid in child_pids(shared.popen.pid)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("RssShmem")
        )

    kept = 2 * RETAINED_BYTES >> 20  # of both workers: the device process uses all pages
    wait_until(lambda: shared_memory() <= kept + 1)
