"""Requests for whole weights, beside the textbook formula in processes without other work."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from bodies import SHAPES, build_request, tensors_of
from load import LoadResult, load
from service import Service
from tables import Cell, Table
from torch import Tensor

from qkv.server.process import usable_cpus

WARM_UP: Final = 5  # calls
TARGET_RATIO: Final = 0.6  # of the rate of explicit attention


def measure_weights(service: Service, seconds: float, client_counts: Sequence[int]) -> Table:
    """Measures requests for full weights at M, beside explicit attention without a service.

    Args:
        service: receives the requests.
        seconds: of each cell.
        client_counts: numbers of clients that send requests at the same time.
    """
    cpus, rates = usable_cpus(), dict[tuple[int, int], float]()
    for processes, threads in dict.fromkeys([(1, 1), (1, cpus), (cpus, 1)]):
        rate = measure_rate(SHAPES["M"], seconds, processes, threads)
        rates[processes, threads] = rate
    best = max(rates.values())
    rows: list[list[Cell]] = [
        [f"explicit, {n} × {m} thread{'s' * (m > 1)}", None, rate, rate / best, *[None] * 5]
        for (n, m), rate in rates.items()
    ]
    ratios = []
    for wire_format in ("V2 binary", "safetensors"):
        request = build_request(service.address, wire_format, tensors_of(SHAPES["M"]), weights=True)
        for clients in client_counts:
            result = load(service.address, request, seconds, clients)
            ratios.append(result.rate / best)
            rows.append([wire_format, clients, result.rate, ratios[-1], *_stage_medians(result)])
    columns = ["", "clients", "requests/s", "of explicit", "ms: median", "attention"]
    columns += ["queue and transfer", "rest in the service", "outside the service"]
    note = (
        f"The best row reaches {max(ratios):.2f} of explicit attention's rate on all CPUs, and "
        f"{max(ratios) * best / rates[1, 1]:.2f} of the rate of one process with one thread. The "
        f"target is {TARGET_RATIO}."
    )
    return Table("weights", columns, rows, note=note)


def _stage_medians(result: LoadResult) -> list[Cell]:
    """Returns median milliseconds: of all, and of four parts of it."""
    stages = [
        (t.latency_ms, t.compute_ms, t.queue_ms + t.transfer_ms,
         t.total_ms - t.compute_ms - t.queue_ms - t.transfer_ms, t.latency_ms - t.total_ms)
        for t in result.timings
    ]  # fmt: skip
    return [statistics.median(ms) for ms in zip(*stages, strict=True)]


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and weights by the textbook formula."""
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return weights @ value, weights


def measure_rate(shape: tuple[int, ...], duration_s: float, processes: int, threads: int) -> float:
    """Returns the calls per second of parallel processes.

    Args:
        shape: (B, H, L, D).
        duration_s: duration of the measurement.
        processes: number of processes.
        threads: threads of each process.
    """
    # This process has threads, which a fork does not copy. A process has one fork server: in the
    # tests of this function, that of the other tests, which has imported other modules.
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(processes), context.Queue()
    arguments = (shape, duration_s, threads, barrier, rates)
    workers = [context.Process(target=_run_calls, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    total: float = sum([rates.get() for _ in workers])
    for worker in workers:
        worker.join()
    return total


def _run_calls(
    shape: tuple[int, ...], duration_s: float, threads: int, barrier: Any, rates: Any
) -> None:
    """Puts the calls per second of this process into a queue."""
    torch.set_num_threads(threads)
    tensors, count = tensors_of(shape).values(), 0
    with torch.inference_mode():
        for _ in range(WARM_UP):
            attend(*tensors)
        barrier.wait()
        start = time.perf_counter()
        while (elapsed_s := time.perf_counter() - start) < duration_s or not count:
            attend(*tensors)
            count += 1
    rates.put(count / elapsed_s)
