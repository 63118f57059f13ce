"""GET /metrics: Prometheus' format, correct sums over all processes, a bounded number of series.

The dashboard of `observe/` queries existing metrics only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ruamel.yaml import YAML

from qkv.attention.catalogue import variants
from qkv.jobs.plan import Plan
from qkv.telemetry.collector import ServiceCollector
from qkv.telemetry.counters import Recorder
from qkv.telemetry.families import BUCKETS, OUTCOMES
from qkv.telemetry.times import Times
from qkv.telemetry.worker_state import SharedState, WorkerState
from support.paths import ROOT
from support.processes import Process, running_command, wait_until
from support.raw_connection import encode_body, encode_request, random_inputs, raw_client
from support.service import Server, running_server
from support.service_processes import JSON, PATH, TINY_BODY, child_pids, stopped

INFER: Final = "/v2/models/softmax/infer"
WORKERS: Final = 3
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
QUEUE_WAIT: Final = "qkv_queue_wait_seconds_sum", frozenset([("variant", "softmax")])


def samples(url: str) -> list[Sample]:
    response = httpx.get(f"{url}/metrics", timeout=60)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return [s for family in text_string_to_metric_families(response.text) for s in family.samples]


def page(url: str) -> Page:
    found = samples(url)
    values = {(s.name, frozenset(s.labels.items())): s.value for s in found}
    assert len(values) == len(found)  # no duplicates
    return values


def value(url: str, name: str, **labels: str) -> float:
    """Returns a sample; parses no other line, since tests wait for a value."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines(keepends=True)
    text = "".join(line for line in lines if line.startswith(f"qkv_{name}"))
    families = text_string_to_metric_families(text)
    (found,) = [
        sample.value
        for family in families
        for sample in family.samples
        if (sample.name, sample.labels) == (f"qkv_{name}", labels)
    ]
    return found


def rise(before: Page, after: Page) -> dict[str, float]:
    """Returns the changes, except for times and for the request to /metrics itself."""
    return {
        f"{name.removeprefix('qkv_')} {' '.join(v for _, v in sorted(labels))}".strip(): now - was
        for ((name, labels), was), now in zip(before.items(), after.values(), strict=True)
        if now != was
        and not re.search(r"seconds|other|response|connections|in_progress|process_", name)
    }


@pytest.fixture(scope="module")
def counted(_clean_environment: None) -> Iterator[Server]:
    """Returns a service of this file, so that nothing else changes its counters meanwhile."""
    with running_server() as server:
        yield server


def test_format_and_names_follow_prometheus(url: str) -> None:
    text = httpx.get(f"{url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert text.endswith("\n")
    assert text.count("# HELP") == text.count("# TYPE") == len(families)
    for family in families:
        assert re.fullmatch(r"(qkv|process)_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert (f"{family.name}_total " in text) == (family.type == "counter")
        absent = ("qkv_device_memory", "qkv_device_process", "qkv_layer", "qkv_key_")  # here
        assert family.samples or family.name.startswith(absent)
        assert all(sample.value >= 0 for sample in family.samples)


def test_histograms_add_up(server: Server) -> None:
    for _ in range(3):
        server.http.post(PATH, content=TINY_BODY, headers=JSON)
    found = page(server.url)
    for name in ("request_duration_seconds", "queue_wait_seconds", "compute_seconds", "batch_size"):
        for variant in variants():
            label = ("variant", variant)
            below = [
                count
                for (n, labels), count in found.items()
                if n == f"qkv_{name}_bucket" and label in labels
            ]
            assert below == sorted(below)
            count = found[f"qkv_{name}_count", frozenset([label])]
            assert (
                below[-1]
                == count
                == found[f"qkv_{name}_bucket", frozenset([label, ("le", "+Inf")])]
            )
            assert (found[f"qkv_{name}_sum", frozenset([label])] > 0) == (count > 0)
    assert found["qkv_compute_seconds_count", frozenset([("variant", "softmax")])] >= 3


def test_bucket_includes_its_upper_bound() -> None:
    state = SharedState(2, variants=["one", "two"])
    recorders = [state.worker(index).recorder for index in range(2)]
    for recorder in recorders:
        for times in (
            Times(queue_s=BUCKETS[3], compute_s=1e9),
            Times(queue_s=BUCKETS[3] * 1.001),
        ):
            recorder.record_response("two", "internal", 1.0, (0, 0), times)
    total = state.counters.total
    *counts, seconds = total("queue_wait_seconds")[1].tolist()
    assert counts == [0, 0, 0, 2, 2, *[0] * (len(BUCKETS) - 4)]
    assert seconds == pytest.approx(4.002 * BUCKETS[3])
    *counts, seconds = total("compute_seconds")[1].tolist()
    assert (counts[0], counts[-1], seconds) == (2, 2, 2e9)
    assert total("compute_seconds")[0].sum() == 0
    recorders[0].record_response("two", "deadline-exceeded", 1.0, (2, 5), None)
    recorders[1].record_response("two", "ok", 1.0, (3, 6), None)
    outcomes = dict(zip(OUTCOMES, total("requests")[1].tolist(), strict=True))
    assert outcomes == dict.fromkeys(OUTCOMES, 0) | {"ok": 1, "deadline-exceeded": 1, "internal": 4}
    assert total("request_duration_seconds")[1][:-1].sum() == 1  # only of successful requests
    assert (total("request_body_bytes"), total("response_body_bytes")) == (5, 11)


def test_requests_on_every_path_count_once(counted: Server) -> None:
    before = page(counted.url)
    body, length = encode_body(random_inputs(0))
    sent = 0
    with raw_client(counted) as client:
        for _ in range(7):
            client.send(encode_request(body, length))
            client.read_response()
            sent += len(body)
    headers = {"Inference-Header-Content-Length": str(length)}
    for path in (PATH, f"{PATH}?x=1", "/v1/attention/%73oftmax"):
        assert counted.http.post(path, content=TINY_BODY, headers=JSON).status_code == 200
        sent += len(TINY_BODY)
    versioned = "/v2/models/softmax/versions/1/infer"
    assert counted.http.post(versioned, content=body, headers=headers).status_code == 200
    sent += len(body)
    gradients = b'{"inputs": {"value": [[1, 2]], "grad_output": [[1, 0]]}}'
    response = counted.http.post("/v1/gradients/mean", content=gradients, headers=JSON)
    assert response.status_code == 200
    sent += len(gradients)
    after = page(counted.url)
    changed = rise(before, after)
    batches = {k: v for k, v in changed.items() if k.startswith("batch_size")}
    assert batches["batch_size_count softmax"] == batches["batch_size_sum softmax"] == 11
    assert {k: v for k, v in changed.items() if k not in batches} == {
        "requests_total ok softmax": 11,
        "requests_total ok mean": 1,
        "request_body_bytes_total": sent,
    }
    for name in ("request_duration", "queue_wait", "compute"):
        for variant, count in (("softmax", 11), ("mean", 1)):
            key = f"qkv_{name}_seconds_count", frozenset([("variant", variant)])
            assert after[key] - before[key] == count


def test_metrics_are_updated_before_the_response(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every path all metrics are updated before the response is sent."""
    counted: list[str] = []
    for name in ("record_batch", "record_response"):
        count = getattr(Recorder, name)

        def slow(*args: Any, count: Any = count, what: str = name) -> None:
            time.sleep(0.05)
            count(*args)
            counted.append(what)

        monkeypatch.setattr(Recorder, name, slow)
    server = serve()
    request = encode_request(*encode_body(random_inputs(0)))
    tasks = ["record_batch", "record_response"]
    with raw_client(server) as client:
        for _ in range(3):
            counted.clear()
            client.send(request)
            client.read_response()
            assert sorted(counted) == tasks
    for method, path, expected in (
        ("POST", PATH, tasks),
        ("GET", "/v1/variants", ["record_response"]),
        ("GET", "/nowhere", ["record_response"]),
    ):
        counted.clear()
        server.http.request(method, path, content=TINY_BODY, headers=JSON)
        assert sorted(counted) == expected


def test_warm_up_jobs_do_not_count_as_queued(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def once(worker: WorkerState, memory: Callable[[], Iterable[int]]) -> None:
        """Records the only heartbeat of the warm-up."""
        worker.record_heartbeat()
        worker.set_memory(memory())

    monkeypatch.setattr(WorkerState, "run_heartbeat", once)
    now = page(serve().url)
    for name in ("queue_depth", "queue_bytes"):
        assert now[f"qkv_{name}", frozenset()] == 0


def test_response_bytes_are_counted_on_every_path(counted: Server) -> None:
    body, length = encode_body(random_inputs(0))

    def counter_and_page_size() -> tuple[int, int]:
        """Returns the counter, and the size of the page itself, which is counted afterwards."""
        text = httpx.get(f"{counted.url}/metrics").text
        (found,) = re.findall(r"^qkv_response_body_bytes_total (\S+)$", text, re.MULTILINE)
        return int(float(found)), len(text)

    before, itself = counter_and_page_size()
    response_bytes = 0
    with raw_client(counted) as client:
        for _ in range(5):
            client.send(encode_request(body, length))
            headers, *_ = client.read_response()
            response_bytes += int(headers["content-length"])
    for response in (
        counted.http.post(PATH, content=TINY_BODY, headers=JSON),
        counted.http.get("/no"),
    ):
        response_bytes += len(response.content)
    assert counter_and_page_size()[0] == before + itself + response_bytes


def test_errors_are_counted_by_outcome(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_body_bytes=4096)
    before = page(server.url)
    post, headers = server.http.post, JSON
    assert post(PATH, content=b"{", headers=headers).status_code == 400
    assert post(PATH, content=b"{}", headers=headers).status_code == 422
    assert post(PATH, content=b" " * 5000, headers=headers).status_code == 413
    assert post(PATH, content=TINY_BODY, headers={"Content-Type": "text/html"}).status_code == 415
    assert post(PATH, content=TINY_BODY, headers=JSON | {"Accept": "image/png"}).status_code == 406
    assert post("/v1/attention/sotfmax", content=TINY_BODY, headers=headers).status_code == 404
    assert post(INFER, json={"inputs": 1}).status_code == 400
    assert post("/v1/convert", content=b"{", headers=headers).status_code == 400
    assert server.http.get(PATH).status_code == 405
    assert server.http.get("/nowhere").status_code == 404
    # /v2 responds with 400 or 503 to these, but the counter has the problem's own name
    wrong = {"inputs": [], "parameters": {"no_such": 1}}
    assert post(INFER, json=wrong).status_code == 400
    monkeypatch.setattr(Plan, "from_message", lambda *_: 1 / 0)
    assert post(PATH, content=TINY_BODY, headers=headers).status_code == 500
    after = page(server.url)
    changed = rise(before, after)
    changed.pop("request_body_bytes_total")
    softmax = {k.split()[1]: v for k, v in changed.items() if k.startswith("requests_total")}
    assert changed["requests_total not-found unknown"] == 1
    assert softmax["internal"] == softmax["payload-too-large"] == softmax["not-acceptable"] == 1
    assert softmax["unsupported-media-type"] == 1
    assert softmax["malformed-request"] + softmax["invalid-content"] == 4
    rejected = {k.split()[1]: v for k, v in changed.items() if k.startswith("rejected_total")}
    assert sum(rejected.values()) == 12
    assert rejected["not-found"] == 2
    assert rejected["method-not-allowed"] == 1


def test_expired_and_cancelled_requests_are_counted_separately(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    body, length = encode_body(random_inputs(0, (1, 8, 300, 64)), parameters={"timeout": 1000})
    headers = {"Inference-Header-Content-Length": str(length)}
    with server.hold():
        assert server.http.post(INFER, content=body, headers=headers).status_code == 503
    assert value(server.url, "requests_total", variant="softmax", outcome="deadline-exceeded") == 1
    body_without_deadline, length = encode_body(random_inputs(0, (1, 8, 300, 64)))
    with server.hold(), raw_client(server) as client:
        client.send(encode_request(body_without_deadline, length))
        server.wait_until_queued(1)
        client.socket.close()
        server.wait_until_queued(0)
    wait_until(
        lambda: (
            value(server.url, "requests_total", variant="softmax", outcome="client-disconnected")
            == 1
        )
    )
    assert value(server.url, "compute_seconds_count", variant="softmax") == 0


def test_queue_metrics_show_queued_requests(counted: Server) -> None:
    wait_until(lambda: value(counted.url, "queue_depth") == value(counted.url, "queue_bytes") == 0)
    waits = page(counted.url).get(QUEUE_WAIT, 0.0)  # of other tests
    with ThreadPoolExecutor(3) as pool:
        with counted.hold():
            futures = [
                pool.submit(
                    httpx.post, counted.url + PATH, content=TINY_BODY, headers=JSON, timeout=60
                )
                for _ in range(3)
            ]
            counted.wait_until_queued(3)
            wait_until(lambda: value(counted.url, "queue_depth") == 3)
            assert value(counted.url, "requests_in_progress") == 3
            assert value(counted.url, "queue_bytes") == 3 * 4 * (3 * 4 + 2 * 4)
            # a server without an acceptor counts none
            assert value(counted.url, "connections") == 0
        assert [a.result().status_code for a in futures] == [200] * 3
    wait_until(lambda: value(counted.url, "queue_depth") == 0)
    assert value(counted.url, "requests_in_progress") == 0
    assert page(counted.url)[QUEUE_WAIT] > waits


def test_client_text_creates_no_series(counted: Server) -> None:
    before = page(counted.url)
    for i in range(20):
        for path in (
            f"/v1/attention/none{i}", f"/v1/gradients/x{i}", f"/v2/models/m{i}/infer", f"/p{i}",
            f"/v2/models/softmax/versions/{i}/infer", f"/v1/attention/%22%0a{i}",
            f"/v1/attention/softmax{i}/", "/v1/attention/unknown", "/v1/attention/other",
        ):  # fmt: skip
            headers = {"X-Request-ID": f"id-{i}", "User-Agent": f"agent {i}"}
            assert counted.http.post(path, content=TINY_BODY, headers=headers).status_code >= 400
            counted.http.request(f"METHOD{i}", path)
    after = page(counted.url)
    assert after.keys() == before.keys()
    unknown = sum(n for k, n in rise(before, after).items() if k.endswith(" unknown"))
    assert unknown == 20 * 6
    assert len(after) < 130 * len(variants())


# ---------------------------------------------------------------- several processes


def post(url: str, count: int) -> None:
    """Sends requests on `count` new connections, four equal ones each."""
    body, length = encode_body(random_inputs(0))
    headers = {"Inference-Header-Content-Length": str(length)}
    for _ in range(count):
        with httpx.Client(base_url=url, timeout=60) as http:
            for _ in range(4):
                assert http.post(INFER, content=body, headers=headers).status_code == 200


def test_every_worker_sums_over_all_processes_and_killed_ones(
    command: Callable[..., Process],
) -> None:
    service_process = command("serve", "--port", "0", "--workers", str(WORKERS))
    workers, url = (
        child_pids(service_process.popen.pid) if service_process.url else [],
        service_process.url,
    )
    assert value(url, "workers") == value(url, "workers_ready") == WORKERS
    for i, worker in enumerate(workers, start=1):
        with stopped(*(pid for pid in workers if pid != worker)):
            post(url, i)
            assert value(url, "requests_total", variant="softmax", outcome="ok") == 4 * sum(
                range(1, i + 1)
            )
    total = 4 * sum(range(1, WORKERS + 1))
    os.kill(workers[-1], signal.SIGKILL)
    wait_until(lambda: workers[-1] not in child_pids(service_process.popen.pid))
    wait_until(lambda: value(url, "workers_ready") == WORKERS)
    for name in ("request_duration_seconds", "queue_wait_seconds", "compute_seconds", "batch_size"):
        assert value(url, f"{name}_count", variant="softmax") == total
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: post(url, 2), range(8)))
    total += 8 * 2 * 4
    wait_until(lambda: value(url, "requests_total", variant="softmax", outcome="ok") == total)
    assert value(url, "batch_size_sum", variant="softmax") == total
    assert service_process.end() == 0


def test_metrics_with_a_device_process(command: Callable[..., Process]) -> None:
    service_process = command("serve", "--port", "0", "--workers", "2", QKV_DEVICE_PROCESS="one")
    url = service_process.url
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: post(url, 3), range(4)))
    wait_until(lambda: value(url, "requests_total", variant="softmax", outcome="ok") == 48)
    for name in ("request_duration_seconds", "queue_wait_seconds", "compute_seconds"):
        assert value(url, f"{name}_count", variant="softmax") == 48
    assert value(url, "batch_size_sum", variant="softmax") == 48
    computed = value(url, "device_seconds_total", variant="softmax")
    assert 0 < computed <= value(url, "compute_seconds_sum", variant="softmax") * 1.001
    assert value(url, "workers") == 2
    assert service_process.end() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_metrics() -> None:
    for workers in ("1", "2"):
        with running_command(
            "serve", "--port", "0", "--workers", workers, QKV_DEVICE="cuda"
        ) as process:
            url = process.url
            post(url, 2)
            wait_until(lambda url=url: value(url, "device_memory_reserved_bytes") > 0)  # type: ignore[misc]
            total = torch.cuda.get_device_properties(0).total_memory
            assert value(url, "device_memory_total_bytes") == total
            reserved = value(url, "device_memory_reserved_bytes")
            assert 0 <= value(url, "device_memory_allocated_bytes") <= reserved < total
            assert value(url, "build_info", version="0.1.0", device="cuda") == 1


# ---------------------------------------------------------------- the dashboard

DASHBOARD: Final = json.loads((ROOT / "observe/dashboard.json").read_text())
PROMQL: Final = {"sum", "max", "by", "rate", "histogram_quantile"}


def queries() -> list[str]:
    """Returns the queries of all panels and variables."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [v["query"] for v in DASHBOARD["templating"]["list"]]


def text_with_device_processes() -> str:
    """Returns the page of a service with every metric that there can be on a CPU."""
    names = tuple(variants())
    state = SharedState(1, variants=names, devices=["cpu"], layers=["a.h.0"])
    state.worker(0).recorder.add_key("alice")
    return generate_latest(ServiceCollector(state, "cpu")).decode()


@functools.cache
def known_labels() -> dict[str, set[str]]:
    """Returns the labels of each metric."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text_with_device_processes()):
        if not family.samples:  # such as device memory on a CPU
            labels[family.name] = set()
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize("query", queries())
def test_dashboard_queries_name_existing_metrics_and_labels(query: str) -> None:
    """Every name in a query is a metric of /metrics, and every label one of that metric."""
    labels = known_labels()
    if listed := re.fullmatch(r"label_values\((\w+), (\w+)\)", query):
        assert listed[2] in labels[listed[1]]
        return
    grouped = re.findall(r"by \((\w+)\)", query)
    matched = re.findall(r'(\w+)=~?"', query)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|by \(\w+\)", " ", query)
    named = set(re.findall(r"[a-z_]\w*", bare)) - PROMQL
    assert named
    for name in named:
        assert name in labels, name
        assert {*grouped, *matched} <= labels[name]
    assert ("rate(" in query) == any(re.search("_(total|sum|count|bucket)$", n) for n in named)
    assert (query.count("("), query.count("{")) == (query.count(")"), query.count("}"))


def test_dashboard_test_fails_for_an_unknown_metric_or_label() -> None:
    for wrong in ("sum(qkv_nothing)", "sum by (outcome) (rate(qkv_batch_size_sum[5m]))"):
        with pytest.raises(AssertionError):
            test_dashboard_queries_name_existing_metrics_and_labels(wrong)


def test_every_metric_is_on_the_dashboard_except_build_info(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    query_text = " ".join(queries())
    families = {family.name for family in text_string_to_metric_families(text)}
    there = text_string_to_metric_families(text_with_device_processes())
    assert families == {family.name for family in there}
    unseen = {name for name in families if name not in query_text and name[:8] != "process_"}
    assert unseen == {"qkv_build_info", "qkv_other_requests"}


def test_compose_profile_mounts_the_files_of_observe() -> None:
    def read(path: str) -> Any:
        return YAML(typ="safe").load((ROOT / path).read_text())

    services = read("docker-compose.yml")["services"]
    watching = {n: s for n, s in services.items() if s.get("profiles") == ["observe"]}
    assert watching.keys() == {"prometheus", "grafana"}
    mounted = {}
    for service in watching.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert volume.endswith(":ro")
                assert (ROOT / source).is_file()
                mounted[target] = source
    (job,) = read("observe/prometheus.yml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == services.keys() - watching.keys()
    (source,) = read("observe/datasource.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    (provider,) = read("observe/dashboards.yml")["providers"]
    home = watching["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == "./observe/dashboard.json"
    assert Path(home).parent == Path(provider["options"]["path"])
