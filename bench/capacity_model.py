"""The arithmetic of many requests a second: from measured costs of one request and data sheets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Final, NamedTuple

FIRST_FORM: Final = "q, k, v in float32"
"""The form of request whose rates are predicted."""

_ETHERNET_BYTES_PER_S: Final = 100e9 / 8 * 1448 / 1538  # payload in frames of 1,500 bytes
_PCIE_BYTES_PER_S: Final = 32e9 * 16 / 8 * 128 / 130  # in each direction
_H200_BYTES_PER_S: Final = 4.8e12
_H200_FLOPS_PER_S: Final = {"float32": 67e12, "bfloat16": 989e12}
_BATCH: Final = 64  # requests at most, and
_BATCH_BYTES: Final = 1 << 30  # in and out
_BATCH_OVERHEAD_S: Final = 100e-6  # about ten kernels, the copies and one wait


class Cost(NamedTuple):
    """Costs of one request.

    Attributes:
        shape: S, M, L or 32 × M.
        form: what the request contains.
        dtype: of its tensors.
        bytes_in: bytes of its body.
        bytes_out: bytes of the response's body.
        flops: operations of the attention, and of the projections with a layer.
        http_cpu_s: CPU time of the HTTP worker, of each round.
        compute_cpu_s: CPU time of the process that computes, of each round.
    """

    shape: str
    form: str
    dtype: str
    bytes_in: int
    bytes_out: int
    flops: int
    http_cpu_s: list[float]
    compute_cpu_s: list[float]


class Unit(NamedTuple):
    """One of the things that requests use up.

    Attributes:
        name: as in tables.
        source: "measured", or where its figures are from.
        seconds: returns the seconds of the unit that one request uses.
    """

    name: str
    source: str
    seconds: Callable[[Cost], float]

    def count_for(self, cost: Cost, rate: float) -> int:
        """Returns the number of units for this number of requests per second."""
        return math.ceil(rate * self.seconds(cost))


class Prediction(NamedTuple):
    """Requests per second of a service: predicted from the cost of one request, and measured."""

    shape: str
    workers: int
    predicted: float
    measured: list[float]


def _gpu_seconds(cost: Cost) -> float:
    """Returns the time on a GPU: the longest of operations, memory and PCIe; a share of a batch."""
    both = cost.bytes_in + cost.bytes_out
    compute_s = cost.flops / _H200_FLOPS_PER_S[cost.dtype]
    pcie_s = max(cost.bytes_in, cost.bytes_out) / _PCIE_BYTES_PER_S
    overhead_s = _BATCH_OVERHEAD_S / max(min(_BATCH, _BATCH_BYTES // both), 1)
    return max(compute_s, both / _H200_BYTES_PER_S, pcie_s) + overhead_s


UNITS: Final = (
    Unit("HTTP processes", "from measured times", lambda cost: statistics.median(cost.http_cpu_s)),
    Unit(
        "network cards",
        "data sheet",
        lambda cost: max(cost.bytes_in, cost.bytes_out) / _ETHERNET_BYTES_PER_S,
    ),
    Unit("GPUs", "data sheets and estimate", _gpu_seconds),
)
"""The parts that a request passes, in order."""

HOST: Final = (64, 4, 8)
"""The number of each unit in a large host."""


def rate_of(cost: Cost) -> tuple[float, list[float]]:
    """Returns the requests per second of `HOST`, and the part of each unit that they use."""
    needed = [unit.seconds(cost) / count for unit, count in zip(UNITS, HOST, strict=True)]
    return 1 / max(needed), [each / max(needed) for each in needed]


def predict_rate(workers: int, cpus: int, worker_cpu_s: float, client_cpu_s: float) -> float:
    """Returns the requests per second of workers that share the CPUs with their clients.

    Args:
        workers: number of workers; each is taken to use one CPU at most.
        cpus: number of CPUs.
        worker_cpu_s: CPU time of a worker for one request, attention included.
        client_cpu_s: CPU time of the client for one request.
    """
    return min(workers / worker_cpu_s, cpus / (worker_cpu_s + client_cpu_s))
