"""The loaded flag and the statistics of a model, over all workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from qkv.attention import catalogue
from qkv.engine.executor import Launched, launch
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.processes import TIMEOUT_S, Process, running_command
from support.service import Server
from support.service_processes import child_pids, status_of, stopped
from support.triton_client import (
    infer_inputs,
    raises_inference_error,
    random_inputs,
    requested_outputs,
    triton_client,
)

WORKERS: Final = 2
INFER: Final = "/v2/models/softmax/infer"
STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")


@pytest.fixture(scope="module")
def service_process(_clean_environment: None) -> Iterator[Process]:
    with running_command("serve", "--port", "0", "--workers", str(WORKERS)) as process:
        assert process.url
        yield process


def each_worker(service_process: Process) -> Iterator[Any]:
    """Yields a client of each worker in turn, with the other worker stopped."""
    workers = child_pids(service_process.popen.pid)
    assert len(workers) == WORKERS
    for other in workers:
        with stopped(other), triton_client(service_process.url) as client:
            assert client.is_server_live()
            yield client


def counted(client: Any) -> dict[str, Any]:
    """Returns the statistics of softmax; checks that both endpoints give the same."""
    everything = client.get_inference_statistics()["model_stats"]
    (every,) = (entry for entry in everything if entry["name"] == "softmax")
    (stats,) = client.get_inference_statistics("softmax")["model_stats"]
    assert every == stats
    assert isinstance(stats, dict)
    return stats


def check_sums(stats: dict[str, Any]) -> None:
    """Checks the sums of statistics after all requests have run one by one without an error."""
    times, count = stats["inference_stats"], stats["inference_count"]
    for name in ("success", *STAGES):
        assert times[name]["count"] == count
        assert times[name]["ns"] > 0
    assert sum(times[name]["ns"] for name in STAGES) <= times["success"]["ns"]
    batches = stats["batch_stats"]
    assert sum(b["compute_infer"]["count"] for b in batches) == stats["execution_count"]
    assert sum(b["batch_size"] * b["compute_infer"]["count"] for b in batches) == count


def test_loading_and_unloading_reaches_every_worker(service_process: Process) -> None:
    """Each worker unloads once and loads once, and each sees both."""
    for unloading in each_worker(service_process):
        unloading.unload_model("softmax", unload_dependents=True)
    seen = 0
    for client in each_worker(service_process):
        assert client.is_server_ready() == (status_of(service_process.url, "/readyz") == 200)
        assert not client.is_model_ready("softmax")
        index = client.get_model_repository_index()
        assert [entry["name"] for entry in index] == list(catalogue.variants())
        (entry,) = (entry for entry in index if entry["name"] == "softmax")
        assert (entry["name"], entry["state"], entry["version"]) == ("softmax", "UNAVAILABLE", "1")
        for call in (client.get_model_metadata, client.get_model_config):
            with raises_inference_error("'softmax' has no available versions", 404):
                call("softmax")
        with raises_inference_error("'softmax' has no available versions", 404):
            client.infer("softmax", infer_inputs(random_inputs()))
        with raises_inference_error("'softmax' has no available versions", 404):
            client.get_inference_statistics("softmax")
        remaining = [entry["name"] for entry in client.get_inference_statistics()["model_stats"]]
        assert remaining == [name for name in catalogue.variants() if name != "softmax"]
        seen += 1
    assert seen == WORKERS
    with httpx.Client(base_url=service_process.url) as http:
        assert http.get("/v2/models").json() == {"models": remaining}
        loaded = http.post("/v2/repository/index", json={"ready": True}).json()
        assert [entry["name"] for entry in loaded] == remaining
        unready = http.get("/v2/models/softmax/ready")
        assert unready.status_code == 400
        assert unready.json()["error"] == "softmax is not loaded"
        assert (
            http.get("/v2/health/ready").status_code == 200
        )  # readiness of the service, not of a model
    with triton_client(service_process.url) as client:
        client.load_model("softmax")
        client.load_model("softmax")  # loading a loaded model is allowed
    for client in each_worker(service_process):
        assert client.is_model_ready("softmax")
        assert all(entry["state"] == "READY" for entry in client.get_model_repository_index())
        assert client.infer("softmax", infer_inputs(random_inputs())).as_numpy("output").shape == (
            2,
            4,
            5,
            6,
        )


def test_statistics_are_summed_over_all_workers(command: Callable[..., Process]) -> None:
    fresh = command("serve", "--port", "0", "--workers", str(WORKERS))
    assert fresh.url
    with triton_client(fresh.url) as client_of_all:
        none = counted(client_of_all)  # warm-up jobs do not count
        assert (none["last_inference"], none["inference_count"], none["batch_stats"]) == (0, 0, [])
        assert all(t == {"count": 0, "ns": 0} for t in none["inference_stats"].values())
    started_at_ms = time.time() * 1e3
    for done, client in enumerate(each_worker(fresh), start=1):
        for _ in range(5):
            client.infer("softmax", infer_inputs(random_inputs()))
            client.infer(
                "softmax",
                infer_inputs(random_inputs()),
                outputs=requested_outputs(output=False, weights=True),
            )
        for wrong in (
            infer_inputs(random_inputs())[:2],
            infer_inputs(random_inputs(np.int64)),
        ):  # never queued: not counted
            with pytest.raises(InferenceServerException):
                client.infer("softmax", wrong)
        stats = counted(client)
        assert stats["inference_count"] == stats["execution_count"] == 10 * done
        assert stats["inference_stats"]["fail"] == {"count": 0, "ns": 0}
        check_sums(stats)
        assert started_at_ms - 1 <= stats["last_inference"] <= time.time() * 1e3
        started_at_ms = stats["last_inference"]
    with httpx.Client(base_url=fresh.url) as http:  # runs through /v1 count too
        rows = [[1.0, 0.0], [0.0, 1.0]]
        inputs = {"inputs": dict.fromkeys(("query", "key", "value"), rows)}
        assert http.post("/v1/attention/softmax", json=inputs).is_success
    with triton_client(fresh.url) as client:
        assert counted(client)["inference_count"] == 10 * WORKERS + 1
        check_sums(counted(client))


def test_statistics_under_load_count_expired_requests(service_process: Process) -> None:
    def loop(index: int) -> int:
        """Sends 25 requests; returns how many expired."""
        late = 0
        with triton_client(service_process.url) as client:
            for number in range(25):
                timeout = 1 if number % 2 else None
                try:
                    client.infer(
                        "softmax", infer_inputs(random_inputs(seed=index)), timeout=timeout
                    )
                except InferenceServerException as error:
                    late += error.status() == "503" and "its deadline passed" in error.message()
        return late

    with triton_client(service_process.url) as client:
        before = counted(client)
        with ThreadPoolExecutor(8) as pool:
            late = sum(pool.map(loop, range(8)))
        after = counted(client)
    check_sums(after)
    grown = {
        name: after["inference_stats"][name]["count"] - times["count"]
        for name, times in before["inference_stats"].items()
    }
    assert grown["success"] == 8 * 25 - late
    assert grown["fail"] == late


def test_expired_request_leaves_the_queue_and_counts_as_failed(
    serve: Callable[..., Server],
) -> None:
    nbytes = sum(array.nbytes for array in random_inputs().values())
    server = serve(max_queue_bytes=2 * nbytes)  # fits one request and its response
    with triton_client(server.url) as client:
        with server.hold():
            with raises_inference_error("waited 0.001 ms in the queue, its deadline passed", 503):
                client.infer("softmax", infer_inputs(random_inputs()), timeout=1)
            assert server.queued_count == 0
            # this request is queued first
            with raises_inference_error("waited 2 ms in the queue, its deadline passed", 503):
                client.infer("softmax", infer_inputs(random_inputs()), timeout=2000)
        stats = counted(client)
        assert stats["inference_stats"]["fail"]["count"] == 2
        assert stats["inference_stats"]["fail"]["ns"] > 0
        assert (stats["inference_count"], stats["execution_count"]) == (0, 0)
        client.infer("softmax", infer_inputs(random_inputs()))
        check_sums(counted(client))


def test_request_cancelled_at_its_deadline_is_not_counted(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    engine, limits = server.engine, Limits(response_bytes=1 << 20, job_bytes=1 << 20)
    tensors = {name: RawTensor.from_numpy(array) for name, array in random_inputs().items()}
    job = Job.new(Plan, "softmax", Message({"outputs": ["output"]}, tensors), limits)

    async def cancel() -> None:
        future = engine.submit(job, wait_s=0.3)
        server.loop.call_later(0.05, future.cancel)
        # so one turn of the loop cancels it, and then sees its deadline
        time.sleep(0.4)  # noqa: ASYNC251

    with engine.paused():
        asyncio.run_coroutine_threadsafe(cancel(), server.loop).result(TIMEOUT_S)
        server.wait_until_queued(0)
    with triton_client(server.url) as client:
        assert counted(client)["inference_stats"]["fail"]["count"] == 0
        assert client.infer("softmax", infer_inputs(random_inputs())).as_numpy("output").shape == (
            2,
            4,
            5,
            6,
        )


@pytest.mark.slow
def test_running_request_gets_its_response_after_its_deadline(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    passed = threading.Event()

    def late(*how: Any) -> Launched:
        """Lets the deadline of a job pass that has just left the queue."""
        server.loop.call_soon_threadsafe(server.loop.call_later, 1.0, passed.set)
        assert passed.wait(TIMEOUT_S)
        return launch(*how)

    server.engine.batch_runner.launch = late
    large = infer_inputs(random_inputs(keys=20_000))  # a small one would not be queued
    with triton_client(server.url) as client:
        result = client.infer("softmax", large, timeout=10**6)
        assert passed.is_set()
        assert result.as_numpy("output").shape == (2, 4, 5, 6)
        assert counted(client)["inference_stats"]["fail"]["count"] == 0
        check_sums(counted(client))


def test_batch_sizes_are_counted(serve: Callable[..., Server]) -> None:
    server = serve(max_batch=4)

    def one(index: int) -> int:
        with triton_client(server.url) as client:
            result = client.infer("softmax", infer_inputs(random_inputs(seed=index)))
        return int(result.get_response()["parameters"]["batch_size"])

    def together(count: int) -> list[int]:
        with ThreadPoolExecutor(count) as pool:
            with server.hold():
                futures = [pool.submit(one, index) for index in range(count)]
                server.wait_until_queued(count)
            return sorted(a.result(TIMEOUT_S) for a in futures)

    assert together(3) == [3, 3, 3]
    assert together(5) == [1, 4, 4, 4, 4]
    assert together(4) == [4, 4, 4, 4]
    with triton_client(server.url) as client:
        stats = counted(client)
    sizes = {b["batch_size"]: b["compute_infer"]["count"] for b in stats["batch_stats"]}
    assert sizes == {1: 1, 3: 1, 4: 2}
    assert (stats["inference_count"], stats["execution_count"]) == (12, 4)
    check_sums(stats)


def test_higher_priority_runs_first(serve: Callable[..., Server]) -> None:
    server = serve(max_batch=1)
    arrays = [random_inputs(seed=number) for number in range(6)]
    started: list[int] = []

    def recorded(jobs: Sequence[Job], *how: Any) -> Launched:
        queries = [bytes(array["query"]) for array in arrays]
        started.extend(queries.index(bytes(job.tensors["query"].data)) for job in jobs)
        return launch(jobs, *how)

    server.engine.batch_runner.launch = recorded

    def one(number: int, priority: int) -> None:
        with triton_client(server.url) as client:
            client.infer("softmax", infer_inputs(arrays[number]), priority=priority)

    with ThreadPoolExecutor(6) as pool:
        with server.hold():
            for number, priority in enumerate((3, 2, 9, 0, 3, 1)):
                pool.submit(one, number, priority)
                server.wait_until_queued(number + 1)
        pool.shutdown()
    assert started == [5, 1, 2, 3, 0, 4]  # priorities 9 and 0 are the default, 2
