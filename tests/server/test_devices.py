"""`qkv serve --devices cpu,cpu`: two device processes behind the workers, with real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qkv.client.request_builders import build_attend
from qkv.settings import Settings
from qkv.wire import safetensors
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process
from support.service_processes import (
    PATH,
    SAFETENSORS,
    device_process_pids,
)

Start = Callable[..., Process]


@pytest.fixture
def start(command: Start) -> Start:
    """Starts the service with two device processes and two workers."""

    def started(module: str = "qkv", **environment: str) -> Process:
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        tests = {"PYTHONPATH": os.pathsep.join(paths)}
        words = ("serve", "--port", "0", "--workers", "2", "--devices", "cpu,cpu")
        process = command(*words, module=module, **tests | environment)
        assert process.url
        return process

    return started


def body(seed: int, length: int = 64) -> bytes:
    draw = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        name: draw.normal(size=(1, 4, length, 16)).astype(np.float32)
        for name in ("query", "key", "value")
    }
    return build_attend("softmax", None, ["output"], "none", arrays).content


def output(response: httpx.Response) -> bytes:
    assert response.status_code == 200, response.text
    return bytes(safetensors.decode(response.content, "outputs").tensors["output"].data)


def metric(url: str, name: str) -> dict[str, float]:
    """Returns a metric of the device processes, by their number."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"qkv_device_process_{name}"
    }


def test_metrics_and_statistics_are_sums_over_both(start: Start) -> None:
    service = start()
    assert any("(2 x cpu, 2 workers)" in line for line in service.lines)
    assert len(device_process_pids(service)) == 2
    with httpx.Client(base_url=service.url, timeout=TIMEOUT_S) as http:
        small, large = body(1), body(1, 2048)
        sent = [small, large] * 10
        with ThreadPoolExecutor(4) as pool:
            outputs = list(
                pool.map(lambda b: output(http.post(PATH, content=b, headers=SAFETENSORS)), sent)
            )
        assert len(set(outputs)) == 2  # the same bits on both
        ran = metric(service.url, "requests_total")
        assert sum(ran.values()) == len(sent)
        assert min(ran.values()) > 0
        (stats,) = http.get("/v2/models/softmax/stats").json()["model_stats"]
        assert stats["inference_count"] == len(sent)
        assert set(metric(service.url, "queue_depth").values()) == {0}
        config = http.get("/v2/models/softmax/config").json()
        assert (config["instance_group"][0]["count"], config["instance_group"][0]["kind"]) == (
            2, "KIND_CPU",
        )  # fmt: skip
        text = http.get("/metrics").text
        assert 'qkv_build_info{device="cpu,cpu",version="0.1.0"} 1.0' in text
    assert service.end() == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"QKV_DEVICES": "cuda:99", "QKV_DEVICE": "auto"},
         "QKV_DEVICES has cuda:99, but torch finds no such device"),
        ({"QKV_DEVICES": "cpu,cuda:0"}, "with commas between several of one kind"),
        ({"QKV_DEVICES": "cpu,"}, "expected cpu, cuda or cuda:N"),
        ({"QKV_DEVICES": "cuda:0"}, "QKV_DEVICE is cpu: leave one of both out"),
        ({"QKV_DEVICES": "cpu", "QKV_DEVICE_PROCESS": "each"},
         "QKV_DEVICE_PROCESS is each: leave one of both out"),
    ],
)  # fmt: skip
def test_wrong_devices_are_a_one_line_error(
    command: Start, environment: dict[str, str], message: str
) -> None:
    process = command("serve", "--port", "0", **environment)
    assert process.wait() == 1
    (line,) = process.lines
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (None, []),
        ("cpu", ["cpu"]),
        ("cuda, cuda:1", ["cuda:0", "cuda:1"]),
        ("cuda:0,cuda:0", ["cuda:0", "cuda:0"]),
    ],
)
def test_names_of_devices(devices: str | None, names: list[str]) -> None:
    assert Settings(devices=devices).device_names == names
