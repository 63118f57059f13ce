"""Measures the cost of a request: beside bare torch, with many clients, with weights, by size.

Every response is compared with the expected bytes.

    python bench/run.py [--seconds 2] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import explicit_attention
import torch
from bodies import FORMATS, SHAPES, build_request, tensors_of
from load import PROCESSES, WARM_UP, load
from run_page import (
    BARE,
    BenchResults,
    BodySizeResult,
    ClientsResult,
    ConnectionsResult,
    ExplicitResult,
    OneClientResult,
    SmallBesideLargeResult,
    WeightsResult,
    WorkloadResult,
    build_tables,
    write_page,
)
from service import Service, running_service
from workloads import WORKLOADS

import qkv
from qkv.server.process import usable_cpus

PAUSE_S: Final = 0.3  # longer than OpenMP threads spin
TEXT_FORMAT: Final = "JSON, lists"
MAX_TEXT_CLIENTS: Final = 16  # at L: 64 would hold 2 GiB of text
BODY_SIZES: Final = tuple(4**n for n in range(5, 15))  # 1 KiB to 256 MiB
QUERY_WIDTH: Final = 32  # of the one query; its many keys make the body large


class Plan(NamedTuple):
    """Cells to measure; `seconds` is the time of each."""

    seconds: float = 2.0
    bursts: int = 5
    shapes: tuple[str, ...] = tuple(SHAPES)
    clients: tuple[int, ...] = (1, 16, 64)
    body_sizes: tuple[int, ...] = BODY_SIZES
    connections: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    workload_clients: tuple[int, ...] = (1, 16)
    small_clients: tuple[int, ...] = (2, 8)


QUICK: Final = Plan(0.1, 1, ("S",), (1, 4), (4**11,), (16,), (2,), (2,))
LARGE_CLIENTS: Final = 2


def measure_one_client(service: Service, plan: Plan) -> Iterator[OneClientResult]:
    """Measures one client and the bare call, in short alternating bursts.

    A slow moment of the machine then affects all of them. A pause separates bursts, because threads
    of the last call continue to spin.
    """
    threads_by_row = {f"{BARE}, {n} thread{'s' * (n > 1)}": n for n in (1, usable_cpus())}
    for shape in plan.shapes:
        tensors = tensors_of(SHAPES[shape])
        requests = {name: build_request(service.address, name, tensors) for name in FORMATS}
        times_ms: dict[str, list[float]] = {row: [] for row in (*threads_by_row, *FORMATS)}
        burst_s = plan.seconds / plan.bursts
        for _ in range(plan.bursts):
            for row, threads in threads_by_row.items():
                torch.set_num_threads(threads)
                time.sleep(PAUSE_S)
                times_ms[row] += _time_bare_calls(tensors, burst_s)
            time.sleep(PAUSE_S)
            for wire_format, request in requests.items():
                timings = load(service.address, request, burst_s).timings
                times_ms[wire_format] += [timing.latency_ms for timing in timings]
        yield from (OneClientResult(shape, row, ms) for row, ms in times_ms.items())


def _time_bare_calls(tensors: dict[str, torch.Tensor], duration_s: float) -> list[float]:
    """Returns the milliseconds of each bare call, after a warm-up."""
    (q, k, v), times_ms = tensors.values(), []
    with torch.inference_mode():
        for _ in range(WARM_UP):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
        end = time.perf_counter() + duration_s
        while (start := time.perf_counter()) < end:
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
            times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def measure_clients(service: Service, plan: Plan) -> Iterator[ClientsResult]:
    """Measures clients that send requests at the same time."""
    for shape in plan.shapes:
        for wire_format in FORMATS:
            request = build_request(service.address, wire_format, tensors_of(SHAPES[shape]))
            for clients in plan.clients:
                if wire_format == TEXT_FORMAT and shape == "L" and clients > MAX_TEXT_CLIENTS:
                    continue
                result = load(service.address, request, plan.seconds, clients)
                yield ClientsResult(shape, wire_format, clients, result, service.resident_bytes)


def measure_workloads(service: Service, plan: Plan) -> Iterator[WorkloadResult]:
    """Measures clients whose requests differ."""
    for workload in WORKLOADS:
        requests = workload.build(service.address)
        for clients in plan.workload_clients:
            yield WorkloadResult(
                workload.name, clients, load(service.address, requests, plan.seconds, clients)
            )


def measure_small_beside_large(service: Service, plan: Plan) -> Iterator[SmallBesideLargeResult]:
    """Measures clients that send small requests while others send large ones; each also alone."""
    small, large = (
        build_request(service.address, "V2 binary", tensors_of(SHAPES[size])) for size in "SL"
    )
    with ThreadPoolExecutor() as pool:
        for clients in plan.small_clients:
            small_alone = load(service.address, small, plan.seconds, clients)
            large_alone = load(service.address, large, plan.seconds, LARGE_CLIENTS)
            large_load = pool.submit(load, service.address, large, plan.seconds, LARGE_CLIENTS)
            small_load = load(service.address, small, plan.seconds, clients)
            yield SmallBesideLargeResult(
                clients, small_alone, small_load, large_alone, large_load.result()
            )


def measure_weights(service: Service, plan: Plan) -> Iterator[WeightsResult | ExplicitResult]:
    """Measures full weights at M, beside explicit attention in processes without other work."""
    cpus = usable_cpus()
    for processes, threads in dict.fromkeys([(1, 1), (1, cpus), (cpus, 1)]):
        rate = explicit_attention.measure_rate(SHAPES["M"], plan.seconds, processes, threads)
        yield ExplicitResult(processes, threads, rate)
    tensors = tensors_of(SHAPES["M"])
    for wire_format in ("V2 binary", "safetensors"):
        request = build_request(service.address, wire_format, tensors, weights=True)
        for clients in plan.clients:
            result = load(service.address, request, plan.seconds, clients)
            yield WeightsResult(wire_format, clients, result)


def measure_connections(service: Service, plan: Plan) -> Iterator[ConnectionsResult]:
    """Measures open connections at S: requests on one after the other, then on all at once."""
    request = build_request(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    for connections in plan.connections:
        with service.sample_memory() as memory:
            sequential = load(service.address, request, plan.seconds, connections, in_flight=1)
            concurrent = load(service.address, request, plan.seconds, connections)
        yield ConnectionsResult(connections, sequential, concurrent, memory)


def measure_body_sizes(service: Service, plan: Plan) -> Iterator[BodySizeResult]:
    """Measures bodies of each size: one query of one head, and as many keys as fit.

    The body grows, the response does not, and the attention reads each number once. The smallest
    size is measured again at the end.
    """
    for size in (*plan.body_sizes, plan.body_sizes[0]):
        tensors = tensors_of((1, 1, 1, QUERY_WIDTH), keys_in(size))
        request = build_request(service.address, "V2 binary", tensors, body_bytes=size)
        with service.sample_memory() as memory:
            result = load(service.address, request, plan.seconds)
        yield BodySizeResult(size, result, memory)


def keys_in(body_bytes: int) -> int:
    """Returns the number of float32 keys and values that fit beside 1 KiB of JSON and query."""
    return max(1, (body_bytes - 1024) // (2 * 4 * QUERY_WIDTH))


def measure(plan: Plan) -> BenchResults:
    """Measures everything: the first five tables on one service, the others on a new one.

    The memory that remains in the new service then belongs to the other tables.
    """
    with running_service() as service:
        one_client = list(measure_one_client(service, plan))
        clients = list(measure_clients(service, plan))
        workloads = list(measure_workloads(service, plan))
        beside_large = list(measure_small_beside_large(service, plan))
        weights = list(measure_weights(service, plan))
    with running_service() as service:
        _warm_up(service)
        connections = list(measure_connections(service, plan))
        body_sizes = list(measure_body_sizes(service, plan))
    return BenchResults(
        one_client, clients, workloads, beside_large, weights, connections, body_sizes
    )


def _warm_up(service: Service) -> None:
    """Sends requests to every worker, so that code loaded by the first one counts as no growth."""
    request = build_request(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    load(service.address, request, 0.0, connections=4 * service.workers)


def main() -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each cell")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    plan = plan._replace(seconds=arguments.seconds or plan.seconds)
    cpus = usable_cpus()
    settings = "".join(
        f", {name}={os.environ[name]}" for name in sorted(os.environ) if name[:4] == "QKV_"
    )
    about = (
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {cpus} CPUs for service and clients{settings}; softmax, cpu, "
        f"float32. S is {SHAPES['S']}, M {SHAPES['M']}, L {SHAPES['L']}. {plan.seconds:g} s per "
        f"cell after {WARM_UP} warm-up requests, from {PROCESSES} client processes; every response "
        "is checked."
    )
    start = time.monotonic()
    results = measure(plan)
    tables = build_tables(about, results)
    print("\n\n".join(tables.values()) + f"\n{time.monotonic() - start:.0f} s")
    if arguments.write:
        write_page(tables)


if __name__ == "__main__":
    main()
