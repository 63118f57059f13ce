"""Exact attention with its weights in plain torch, in processes without other work."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any, Final

import torch
from bodies import tensors_of
from torch import Tensor

WARM_UP: Final = 5  # calls


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
    # The fork server has imported torch but has no threads, which a fork does not copy.
    context = multiprocessing.get_context("forkserver")
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
