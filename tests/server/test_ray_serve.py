"""Tests of qkv on a real Ray: every kind of request, and replicas that start, die and stop."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray_cluster import RayCluster, running_ray
from ruamel.yaml import YAML
from tritonclient import http as triton

from qkv import Client, errors
from qkv.server.ray_serve import Replica, app
from qkv.server.ray_serve.request_router import FlopsRouter
from support.clients import numbers
from support.processes import TIMEOUT_S, wait_until
from support.triton_client import infer_inputs, raises_inference_error, random_inputs

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"
KILLED_AFTER = 30  # responses; with 4 threads, some requests are in the replica then


@pytest.fixture(scope="module")
def cluster(_clean_environment: None) -> Iterator[RayCluster]:
    """Returns a Ray with one replica of qkv."""
    with running_ray() as running:
        running.run(Replica, 1, device="cpu", request_log="json")
        yield running


def log_lines(cluster: RayCluster) -> list[dict[str, Any]]:
    """Returns the lines of all replicas' request logs."""
    paths = cluster.folder.glob("session_latest/logs/worker-*.out")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.startswith('{"time"')]


def replica_actors() -> set[str]:
    """Returns the names of the replicas that live."""
    time.sleep(0.1)  # tests poll, and the machine is busy
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {a["name"] for a in actors if a["name"].startswith("SERVE_REPLICA::default#qkv#")}


@pytest.mark.slow
@pytest.mark.representative
def test_clients_are_answered_through_the_proxy(cluster: RayCluster) -> None:
    inputs, long = numbers(), np.ones((1, 2, 512, 8), np.float32)
    expected = softmax(**inputs)
    with Client(cluster.url, retries=0) as client:
        run = client.attend("softmax", **inputs)
        np.testing.assert_allclose(run.output, expected, rtol=1e-4, atol=1e-5)
        large = client.attend("softmax", query=long, key=long, value=long)
        np.testing.assert_allclose(large.weights, 1 / 512, rtol=1e-4)
        with pytest.raises(errors.InvalidContent, match="key has"):
            client.attend("softmax", **inputs | {"key": inputs["key"][..., :1]})
        with pytest.raises(errors.NotFound):
            client.attend("nothing", **inputs)
        with client.sweep(["softmax"], [16, 32], repeats=2, progress=False) as sweep:
            assert [cell.length for cell in sweep] == [16, 32]
    with closing(triton.InferenceServerClient(cluster.url.removeprefix("http://"))) as other:
        assert other.is_server_ready()
        arrays = random_inputs()
        output = other.infer("softmax", infer_inputs(arrays)).as_numpy("output")
        np.testing.assert_allclose(output, softmax(**arrays), rtol=1e-4, atol=1e-5)
        with raises_inference_error("not allowed under Ray Serve"):
            other.unload_model("softmax")
        assert other.is_model_ready("softmax")


def softmax(query: Any, key: Any, value: Any) -> Any:
    """Returns exact attention in float64, with grouped heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array.astype(float), repeats, 1) for array in (key, value))
    scores = query.astype(float) @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


@pytest.mark.slow
def test_response_has_one_id_which_is_that_of_the_log(cluster: RayCluster) -> None:
    for headers in ({}, {"x-request-id": "chosen-by-the-client"}):
        for path, status in (("/readyz", 200), ("/nothing", 404)):
            response = httpx.get(cluster.url + path, headers=headers)
            assert response.status_code == status
            (id,) = response.headers.get_list("x-request-id")
            assert id == headers.get("x-request-id", id)
            wait_until(
                lambda: any(  # is called before the loop goes on
                    (line["request_id"], line["path"]) == (id, path)  # noqa: B023
                    for line in log_lines(cluster)
                )
            )


@pytest.mark.slow
def test_page_and_its_files_are_served_through_the_proxy(cluster: RayCluster) -> None:
    with httpx.Client(base_url=cluster.url) as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        scripts = re.findall(r'src="([^"]+\.js)"', page.text)
        assert scripts
        for script in scripts:
            response = http.get(script if script.startswith("/") else f"/{script}")
            assert response.status_code == 200
            assert "javascript" in response.headers["content-type"]
        assert http.get("/openapi.json").json()["info"]["title"] == "qkv"
        body = {"inputs": {name: [[1.0, 0.0], [0.0, 1.0]] for name in ("query", "key", "value")}}
        response = http.post("/v1/attention/softmax", json=body)
        assert np.shape(response.json()["outputs"]["output"]) == (2, 2)


@pytest.mark.slow
def test_metrics_of_a_replica_are_exported_with_its_label(cluster: RayCluster) -> None:
    with Client(cluster.url) as client:
        client.attend("softmax", **numbers())

    def samples() -> list[str]:
        text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics").text
        return [
            line
            for line in text.splitlines()
            if line.startswith("ray_qkv_requests_total{")
            and 'variant="softmax"' in line
            and 'outcome="ok"' in line
            and float(line.rpartition(" ")[2]) >= 1
        ]

    wait_until(lambda: bool(samples()))
    assert all(re.search(r'\breplica="\w+"', line) for line in samples())


@pytest.mark.slow
@pytest.mark.representative
def test_no_call_fails_while_replicas_start_die_and_stop(cluster: RayCluster) -> None:
    inputs = numbers()
    expected = softmax(**inputs)
    stop, counts = threading.Event(), [0] * 4

    def call(index: int) -> None:
        with Client(cluster.url, retries=8) as client:
            while not stop.is_set():
                output = client.attend("softmax", **inputs).output
                np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
                counts[index] += 1

    def wait_for_responses(count: int) -> None:
        least = sum(counts) + count
        wait_until(lambda: sum(counts) >= least or any(f.done() for f in calls))

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, index) for index in range(4)]
        try:
            wait_for_responses(KILLED_AFTER)
            cluster.run(Replica, 3, device="cpu", request_log="json")
            wait_for_responses(KILLED_AFTER)
            (killed, *_) = replica_actors()
            ray.kill(ray.get_actor(killed, namespace="serve"))
            wait_for_responses(KILLED_AFTER)
            wait_until(lambda: len(replica_actors() - {killed}) == 3)  # it is replaced
            cluster.run(Replica, 1, device="cpu", request_log="json")
            wait_until(lambda: len(replica_actors()) == 1)
            wait_for_responses(KILLED_AFTER)
        finally:
            stop.set()
        for ended in calls:
            ended.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": "no"}, "setting threads is wrong: got 'no': "),
        ({"thread": 1}, "setting thread is wrong"),
        ({"port": 80}, "port has no effect under Ray Serve: got 80, expected http_options"),
        ({"workers": 2}, "workers has no effect under Ray Serve: got 2, expected num_replicas"),
    ],
)
def test_wrong_setting_is_rejected_before_a_replica_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        app(arguments)


def test_wrong_key_is_not_shown() -> None:
    with pytest.raises(ValueError, match="api_keys") as caught:
        app({"api_keys": "se cret"})
    assert "cret" not in str(caught.value)


def test_replica_reserves_its_threads_and_its_gpu() -> None:
    def resources(**arguments: Any) -> Any:
        return app(arguments)._bound_deployment.ray_actor_options

    assert resources(threads="3") == {"num_cpus": 3, "num_gpus": 0}
    assert resources(device="cuda") == {"num_cpus": 1, "num_gpus": 1}


def load_yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)


def test_configuration_is_valid_and_the_same_in_both_files() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = (DEPLOY / "config.yaml").read_text()
    config = ServeDeploySchema.model_validate(load_yaml(text))
    (application,) = config.applications
    assert application.import_path == "qkv.server.ray_serve:app"
    deployment = app(application.args)._bound_deployment
    (changes,) = application.deployments
    assert changes.name == deployment.name
    manifest = load_yaml((DEPLOY / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert load_yaml(manifest["spec"]["serveConfigV2"]) == load_yaml(text)
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


class Replicas:
    """A router and replicas that have these numbers of requests."""

    def __init__(self, **requests: int) -> None:
        self.router = object.__new__(FlopsRouter)
        self.router.initialize_state()
        self.router._replicas = {name: SimpleNamespace(replica_id=name) for name in requests}
        self.router._replica_queue_len_cache = requests

    def choose(self, pending: Any = None) -> str:
        (best,), *_ = asyncio.run(self.router.choose_replicas([], pending))
        return str(best.replica_id)

    def send(self, id: str, size: int) -> tuple[Any, str]:
        """Chooses a replica for a request; returns both."""
        scope = {"headers": [(b"content-length", str(size).encode())]}
        pending = SimpleNamespace(
            args=[pickle.dumps(SimpleNamespace(asgi_scope=scope))],
            metadata=SimpleNamespace(internal_request_id=id),
            future=Future(),
        )
        return pending, self.choose(pending)


def test_request_goes_to_the_replica_with_fewer_operations() -> None:
    replicas = Replicas(a=0, b=1)
    _, busy = replicas.send("large", 4_000_000)
    assert busy == "a"
    for number in range(3):
        assert replicas.send(f"small {number}", 400_000)[1] == "b"
    replicas.router.on_request_completed("a", "large")
    assert replicas.choose() == "a"


def test_request_counts_for_the_replica_that_accepts_it() -> None:
    replicas = Replicas(a=0, b=1)
    pending, chosen = replicas.send("large", 4_000_000)
    replicas.router.on_request_routed(pending, "b", None)
    assert (chosen, replicas.choose()) == ("a", "a")
    replicas.router.on_request_completed("b", "large")
    replicas.router.on_request_routed(pending, "b", None)  # late
    assert replicas.send("next", 4_000_000)[1] == "a"
    assert replicas.choose() == "b"


def test_cancelled_and_answered_requests_do_not_count() -> None:
    replicas = Replicas(a=0, b=1)
    pending, _ = replicas.send("large", 4_000_000)
    pending.future.cancel()
    assert replicas.send("other", 4)[1] == "a"
    done, _ = replicas.send("done", 4)
    replicas.router.on_request_completed("b", "done")
    done.future.set_result(None)
    replicas.choose(done)
    assert not replicas.router._sent_flops["b"]


def test_equal_operations_are_compared_by_requests() -> None:
    assert Replicas(a=1, b=0).choose() == "b"
    assert Replicas(a=1).choose() == "a"


@pytest.mark.parametrize("failure", ["device", "thread", "stuck"])
def test_replica_whose_device_fails_is_unhealthy(failure: str) -> None:
    failed = asyncio.Event()
    if failure == "device":
        failed.set()
    engine = SimpleNamespace(is_alive=failure != "thread", failed=failed)
    state = SimpleNamespace(stuck_processes=[0] if failure == "stuck" else [])
    runtime = SimpleNamespace(engine=engine, worker=SimpleNamespace(shared_state=state))
    with pytest.raises(RuntimeError, match="the device"):
        Replica.func_or_class.check_health(SimpleNamespace(_runtime=runtime))
