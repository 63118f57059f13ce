"""Exact attention with its weights in plain torch, in processes without other work."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any, Final

import torch
from bodies import tensors_of
from torch import Tensor

WARM_UP: Final = 5


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and weights by the textbook formula."""
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return weights @ value, weights


def rate(shape: tuple[int, ...], seconds: float, processes: int, threads: int) -> float:
    """Returns the calls per second of parallel processes.

    Args:
        shape: (B, H, L, D).
        seconds: duration of the measurement.
        processes: number of processes.
        threads: threads of each process.
    """
    # The fork server has imported torch but has no threads, which a fork does not copy.
    forked = multiprocessing.get_context("forkserver")
    start, counts = forked.Barrier(processes), forked.Queue()
    given = (shape, seconds, threads, start, counts)
    started = [forked.Process(target=_call, args=given) for _ in range(processes)]
    for process in started:
        process.start()
    rates: list[float] = [counts.get() for _ in started]
    for process in started:
        process.join()
    return sum(rates)


def _call(shape: tuple[int, ...], seconds: float, threads: int, start: Any, counts: Any) -> None:
    torch.set_num_threads(threads)
    tensors, count = tensors_of(shape).values(), 0
    with torch.inference_mode():
        for _ in range(WARM_UP):
            attend(*tensors)
        start.wait()
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds or not count:
            attend(*tensors)
            count += 1
    counts.put(count / passed)
