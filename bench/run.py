"""The service against the bare torch call: what a request costs beside the attention itself.

One caller, one connection, bursts in turn (bare, service, bare, ...), so that a slow moment of the
machine falls on both. Prints medians with their quartiles, and the ratio.

    python bench/run.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import torch

import qkv
from qkv.message import Message
from qkv.tensors import RawTensor
from qkv.wire import json

SHAPES = {"S": (1, 1, 64, 64), "M": (1, 8, 128, 64), "L": (1, 8, 1024, 64)}
WARM_UP = 5
BURSTS = 5
REST_S = 0.3  # longer than OpenMP threads spin


@contextmanager
def serving() -> Iterator[str]:
    """A service of its own process on a free port; its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qkv", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        yield found.group()
    finally:
        process.terminate()
        process.wait()


def in_turn(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call, in short bursts in turn, `seconds` for each in all.

    Bursts with a rest between them, because the threads of the call before go on spinning for a
    while and would be measured too.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BURSTS):
        for name, call in calls.items():
            time.sleep(REST_S)
            call()
            end = time.perf_counter() + seconds / BURSTS
            while (started := time.perf_counter()) < end:
                call()
                times[name].append((time.perf_counter() - started) * 1e3)
    return times


def request(http: httpx.Client, tensors: dict[str, np.ndarray], encoding: str) -> Any:
    """A call that posts the tensors and reads the answer's output back."""
    fields = {"outputs": ["output"]}
    raw = {name: RawTensor.from_numpy(t) for name, t in tensors.items()}
    body = b"".join(json.encode(Message(fields, raw, encoding=encoding), "inputs"))

    def call() -> Message:
        response = http.post(
            "/v1/attention/softmax", content=body, headers={"Content-Type": json.MEDIA_TYPE}
        )
        response.raise_for_status()
        return json.decode(response.content, "outputs")

    return call


def main() -> None:
    """Measures, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="per row")
    seconds = parser.parse_args().seconds
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print(
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {threads} CPUs; softmax, float32, output only, cpu; one caller; "
        f"{WARM_UP} calls of warm-up"
    )
    print(f"{'shape':22}{'what':16}{'calls':>6}{'median ms':>11}{'quartiles':>18}{'x bare':>8}")
    with serving() as url, httpx.Client(base_url=url, timeout=60) as http:
        for label, shape in SHAPES.items():
            q, k, v = (torch.randn(shape) for _ in range(3))
            tensors = {"query": q.numpy(), "key": k.numpy(), "value": v.numpy()}
            with torch.inference_mode():
                calls: dict[str, Callable[[], Any]] = {
                    "bare torch": lambda q=q, k=k, v=v: (  # type: ignore[misc]
                        torch.nn.functional.scaled_dot_product_attention(q, k, v)
                    ),
                    "service, base64": request(http, tensors, "base64"),
                    "service, lists": request(http, tensors, "lists"),
                }
                times = in_turn(calls, seconds)
            bare = statistics.median(times["bare torch"])
            for name, values in times.items():
                low, median, high = statistics.quantiles(values, n=4)
                print(
                    f"{f'{label} {shape}':22}{name:16}{len(values):6}{median:11.3f}"
                    f"{f'{low:.3f} - {high:.3f}':>18}{median / bare:8.1f}"
                )


if __name__ == "__main__":
    main()
