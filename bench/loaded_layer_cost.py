"""Measures a request with a loaded layer beside one with queries, keys and values, at M.

    python bench/loaded_layer_cost.py [--seconds 10] [--json FILE] [--write]

The requests alternate in short bursts of one client. The response to the loaded layer must have the
bits of the response to the same layer in a request. The CPU time is that of all processes of the
service: other work of the machine changes it less than the latency.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from bodies import SHAPES, build_request, tensors_of
from load import WARM_UP, BenchRequest, load
from safetensors.torch import save_file
from service import running_service
from tables import RESULTS, Cell, Results, Table, add_options, describe_machine, finish, quartiles
from torch import Tensor

from qkv.attention.layers import projection
from qkv.client.arrays import to_raw
from qkv.wire import safetensors
from qkv.wire.message import Message

COMMAND: Final = "python bench/loaded_layer_cost.py"
BURSTS: Final = 20
PROJECTIONS: Final = "the four projections alone"
TARGET: Final = 1.15  # of queries, keys and values plus the projections
_, HEADS, LENGTH, HEAD_WIDTH = SHAPES["M"]
WIDTH: Final = HEADS * HEAD_WIDTH
MODULES: Final = ("self.query", "self.key", "self.value", "output.dense")


def layer_tensors() -> dict[str, Tensor]:
    """Returns the attention of a BERT of one layer."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module in MODULES:
        tensors[f"{module}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        tensors[f"{module}.bias"] = torch.randn(WIDTH, generator=generator)
    return tensors


def write_checkpoint(folder: Path) -> None:
    """Writes the layer as a checkpoint."""
    prefix = "encoder.layer.0.attention."
    save_file({prefix + n: t for n, t in layer_tensors().items()}, folder / "model.safetensors")
    config = {"model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS}
    (folder / "config.json").write_text(json.dumps(config))


def build_layer_request(
    address: tuple[str, int], layer: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> BenchRequest:
    """Returns a request with x and a layer, and its expected response, after one request."""
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    raw = {name: to_raw(tensor) for name, tensor in tensors.items()}
    message = Message({"weights": "none", "layer": dict(layer)}, {"x": to_raw(x)}, raw)
    body = b"".join(safetensors.encode(message, "inputs"))
    headers = {"Content-Type": safetensors.MEDIA_TYPE}
    request = BenchRequest("/v1/attention/softmax", headers, body)
    connection = http.client.HTTPConnection(*address)
    connection.request("POST", request.path, request.body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == 200, content
    (output,) = safetensors.decode(content, "outputs").tensors.values()
    return dataclasses.replace(request, expected_bytes=bytes(output.data), is_at_end=True)


def time_projections(seconds: float) -> tuple[list[float], float]:
    """Runs the layer's four projections in bare torch, with one thread.

    Returns:
        The milliseconds of each run, and the milliseconds of CPU of all.
    """
    torch.set_num_threads(1)
    tensors, times_ms = layer_tensors(), list[float]()
    weights = [(tensors[f"{m}.weight"].T.contiguous(), tensors[f"{m}.bias"]) for m in MODULES]
    x = torch.randn(1, LENGTH, WIDTH)
    cpu_s = time.thread_time()
    with torch.inference_mode():
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end or len(times_ms) < WARM_UP:
            for weight, bias in weights:
                projection.apply(x, weight, bias)
            times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms, (time.thread_time() - cpu_s) * 1e3


def measure(seconds: float) -> Table:
    """Measures the requests and the projections, in bursts that alternate."""
    times_ms, cpu_ms = dict[str, list[float]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        with running_service(QKV_CHECKPOINTS=f"bench={folder}", QKV_THREADS="1") as service:
            inline = {"layout": "bert", "heads": HEADS}
            requests = {
                "queries, keys, values": build_request(
                    service.address, "safetensors", tensors_of(SHAPES["M"])
                ),
                "x and a loaded layer": build_layer_request(
                    service.address, {"name": "bench.encoder.layer.0"}, {}
                ),
                "x and the layer's tensors": build_layer_request(
                    service.address, inline, layer_tensors()
                ),
            }
            _, loaded, sent = requests.values()
            assert loaded.expected_bytes == sent.expected_bytes
            for _ in range(BURSTS):
                for name, request in requests.items():
                    before = service.cpu_s
                    timings = load(service.address, request, seconds / BURSTS).timings
                    used_s = sum(service.cpu_s) - sum(before)
                    times_ms.setdefault(name, []).extend(t.latency_ms for t in timings)
                    per_request = used_s * 1e3 * len(timings) / (len(timings) + WARM_UP)
                    cpu_ms[name] = cpu_ms.get(name, 0.0) + per_request
                ms, cpu = time_projections(seconds / BURSTS)
                times_ms.setdefault(PROJECTIONS, []).extend(ms)
                cpu_ms[PROJECTIONS] = cpu_ms.get(PROJECTIONS, 0.0) + cpu
    used = [cpu_ms[name] / len(ms) for name, ms in times_ms.items()]
    plain, of_loaded, of_sent, alone = used
    rows: list[list[Cell]] = [
        [name, quartiles(ms), cpu, cpu / (plain + alone)]
        for (name, ms), cpu in zip(times_ms.items(), used, strict=True)
    ]
    note = (
        f"A loaded layer takes {of_loaded / (plain + alone):.2f} times the CPU time of queries, "
        f"keys and values and the projections together; the target is {TARGET}. The tensors in "
        f"the request take {of_sent / of_loaded:.1f} times that of a loaded layer."
    )
    columns = ["request", "latency, ms (quartiles)", "CPU, ms", "of both"]
    return Table("loaded layers", columns, rows, note=note)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table, and writes it on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each row")
    add_options(parser)
    options = parser.parse_args(arguments)
    header = describe_machine(
        variant="softmax, cpu, float32, 1 thread",
        shape=f"x (1, {LENGTH}, {WIDTH}), {HEADS} heads",
        seconds=f"{options.seconds:g} for each row, in {BURSTS} bursts",
        warm_up=f"{WARM_UP} requests",
    )
    finish(Results(COMMAND, header, [measure(options.seconds)]), RESULTS / "requests.md", options)


if __name__ == "__main__":
    main()
