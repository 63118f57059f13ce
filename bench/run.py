"""Measures the cost of a request: beside bare torch, with many clients, with weights, by size.

Every response is compared with the expected bytes.

    python bench/run.py [--seconds 2] [--quick] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import torch
from bodies import FORMATS, SHAPES, build_request, tensors_of
from explicit_attention import measure_weights
from fair_shares import measure_fair_shares
from load import MIN_RESPONSES, PROCESSES, WARM_UP, LoadResult, load
from service import ResidentMemory, Service, running_service
from tables import (
    RESULTS,
    Cell,
    Results,
    Table,
    add_options,
    describe_machine,
    finish,
    percentile,
    quartiles,
)
from workloads import WORKLOADS

from qkv.server.process import usable_cpus

PAGE: Final = RESULTS / "requests.md"
BARE: Final = "bare torch"
PAUSE_S: Final = 0.3  # longer than OpenMP threads spin
TEXT_FORMAT: Final = "JSON, lists"
MAX_TEXT_CLIENTS: Final = 16  # at L: 64 would hold 2 GiB of text
BODY_SIZES: Final = tuple(4**n for n in range(5, 15))  # 1 KiB to 256 MiB
QUERY_WIDTH: Final = 32  # of the one query; its many keys make the body large
_MEMORY: Final = ("resident, MiB: peak", "after")


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
    flood: int = 64
    rounds: int = 3


QUICK: Final = Plan(0.1, 1, ("S",), (1, 4), (4**11,), (16,), (2,), (2,), 2, 1)
LARGE_CLIENTS: Final = 2


def measure_one_client(service: Service, plan: Plan) -> Table:
    """Measures one client and the bare call, in short alternating bursts.

    A slow moment of the machine then affects all of them. A pause separates bursts, because threads
    of the last call continue to spin.
    """
    columns, rows = ["one client"], dict[str, list[Cell]]()
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
        columns += [f"{shape}, ms (quartiles)", "× bare"]
        bare = min(statistics.median(times_ms[row]) for row in threads_by_row)
        for row, ms in times_ms.items():
            rows.setdefault(row, [row]).extend([quartiles(ms), statistics.median(ms) / bare])
    return Table("bare", columns, list(rows.values()))


def _time_bare_calls(tensors: dict[str, torch.Tensor], duration_s: float) -> list[float]:
    """Returns the milliseconds of each bare call, after a warm-up."""
    (q, k, v), times_ms = tensors.values(), list[float]()
    with torch.inference_mode():
        for _ in range(WARM_UP):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
        end = time.perf_counter() + duration_s
        while (start := time.perf_counter()) < end or len(times_ms) < MIN_RESPONSES:
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
            times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def measure_clients(service: Service, plan: Plan) -> Table:
    """Measures clients that send requests at the same time."""
    columns = ["", ""]
    for clients in plan.clients:
        columns += [f"{_count_clients(clients)}, requests/s", "p50 / p99, ms"]
    rows: list[list[Cell]] = []
    missed = []
    for shape in plan.shapes:
        for wire_format in FORMATS:
            request = build_request(service.address, wire_format, tensors_of(SHAPES[shape]))
            row: list[Cell] = [shape, wire_format]
            for clients in plan.clients:
                if wire_format == TEXT_FORMAT and shape == "L" and clients > MAX_TEXT_CLIENTS:
                    row += [None, None]
                    continue
                result = load(service.address, request, plan.seconds, clients)
                p50, p99 = _percentiles(result)
                row += [result.rate, [p50, p99]]
                if clients == 1 and p99 > 2 * p50 + 1:
                    missed.append(f"{shape} in {wire_format}")
            rows.append(row)
    but = f" but {'; '.join(missed)}" if missed else ""
    target = f"Target for one client: p99 is at most twice p50 plus 1 ms. All rows{but} meet it."
    return Table("clients", columns, rows, labels=2, note=target)


def measure_workloads(service: Service, plan: Plan) -> Table:
    """Measures clients whose requests differ."""
    columns = [""]
    for clients in plan.workload_clients:
        columns += [f"{_count_clients(clients)}, requests/s", "of the same bytes", "p50 / p99, ms"]
    rows: list[list[Cell]] = []
    same: dict[int, float] = {}
    for workload in WORKLOADS:  # the first one repeats the same bytes
        requests = workload.build(service.address)
        row: list[Cell] = [workload.name]
        for clients in plan.workload_clients:
            result = load(service.address, requests, plan.seconds, clients)
            ratio = result.rate / same.setdefault(clients, result.rate)
            row += [result.rate, ratio, _percentiles(result)]
        rows.append(row)
    return Table("workloads", columns, rows)


def measure_small_beside_large(service: Service, plan: Plan) -> Table:
    """Measures clients that send small requests while others send large ones; each also alone."""
    small, large = (
        build_request(service.address, "V2 binary", tensors_of(SHAPES[size])) for size in "SL"
    )
    rows: list[list[Cell]] = []
    with ThreadPoolExecutor() as pool:
        for clients in plan.small_clients:
            small_alone = load(service.address, small, plan.seconds, clients)
            large_alone = load(service.address, large, plan.seconds, LARGE_CLIENTS)
            large_load = pool.submit(load, service.address, large, plan.seconds, LARGE_CLIENTS)
            together = load(service.address, small, plan.seconds, clients)
            beside = large_load.result()
            rows.append([
                clients, small_alone.rate, together.rate, together.rate / small_alone.rate,
                _percentiles(together), large_alone.rate, beside.rate,
                beside.rate / large_alone.rate,
            ])  # fmt: skip
    columns = ["clients at S", "S alone, requests/s", "S beside L", "ratio", "p50 / p99, ms"]
    columns += ["L alone, requests/s", "L beside S", "ratio"]
    return Table("small beside large", columns, rows)


def measure_connections(service: Service, plan: Plan) -> Table:
    """Measures open connections at S: requests on one after the other, then on all at once."""
    request = build_request(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    rows: list[list[Cell]] = []
    for connections in plan.connections:
        with service.sample_memory() as memory:
            sequential = load(service.address, request, plan.seconds, connections, in_flight=1)
            concurrent = load(service.address, request, plan.seconds, connections)
        added_ms = [timing.added_ms for timing in sequential.timings]
        rows.append([
            connections, quartiles(added_ms), percentile(added_ms, 99), concurrent.rate,
            _percentiles(concurrent), *_mebibytes(memory),
        ])  # fmt: skip
    columns = ["connections", "in turn, ms added (quartiles)", "p99", "all at once, requests/s"]
    return Table("connections", [*columns, "p50 / p99, ms", *_MEMORY], rows)


def measure_body_sizes(service: Service, plan: Plan) -> Table:
    """Measures bodies of each size: one query of one head, and as many keys as fit.

    The body grows, the response does not, and the attention reads each number once. The smallest
    size is measured again at the end.
    """
    rows: list[list[Cell]] = []
    for size in (*plan.body_sizes, plan.body_sizes[0]):
        tensors = tensors_of((1, 1, 1, QUERY_WIDTH), keys_in(size))
        request = build_request(service.address, "V2 binary", tensors, body_bytes=size)
        with service.sample_memory() as memory:
            timings = load(service.address, request, plan.seconds).timings
        added_ms = [timing.added_ms for timing in timings]
        is_again = len(rows) == len(plan.body_sizes)
        rows.append([
            _format_bytes(size) + ", again" * is_again,
            statistics.median(timing.latency_ms for timing in timings),
            statistics.median(timing.compute_ms for timing in timings),
            quartiles(added_ms),
            statistics.median(added_ms) * 2**20 / size if size >= 2**20 else None,
            *_mebibytes(memory),
        ])  # fmt: skip
    columns = ["body", "ms: median", "attention", "added (quartiles)", "added per MiB"]
    return Table("sizes", [*columns, *_MEMORY], rows)


def _count_clients(count: int) -> str:
    return f"{count} client{'s' * (count > 1)}"


def _percentiles(result: LoadResult) -> list[float]:
    """Returns p50 and p99 of the latencies in milliseconds."""
    latencies_ms = [timing.latency_ms for timing in result.timings]
    return [percentile(latencies_ms, 50), percentile(latencies_ms, 99)]


def _mebibytes(memory: ResidentMemory) -> list[Cell]:
    return [round(size / 2**20) for size in (memory.peak, memory.after)]


def _format_bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def keys_in(body_bytes: int) -> int:
    """Returns the number of float32 keys and values that fit beside 1 KiB of JSON and query."""
    return max(1, (body_bytes - 1024) // (2 * 4 * QUERY_WIDTH))


def measure(plan: Plan) -> list[Table]:
    """Measures everything: the first five tables on one service, the last two on a new one.

    The memory that remains in the new service then belongs to these tables.
    """
    first: Sequence[Measure] = (
        measure_one_client, measure_clients, measure_workloads, measure_small_beside_large,
    )  # fmt: skip
    with running_service() as service:
        tables = [each(service, plan) for each in first]
        tables.append(measure_weights(service, plan.seconds, plan.clients))
    tables.append(measure_fair_shares(plan.seconds, plan.flood, plan.rounds))
    with running_service() as service:
        _warm_up(service)
        return [*tables, measure_connections(service, plan), measure_body_sizes(service, plan)]


Measure = Callable[[Service, Plan], Table]


def _warm_up(service: Service) -> None:
    """Sends requests to every worker, so that code loaded by the first one counts as no growth."""
    request = build_request(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    load(service.address, request, 0.0, connections=4 * service.workers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each cell")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    add_options(parser)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = plan._replace(seconds=options.seconds or plan.seconds)
    header = describe_machine(
        CPUs=f"{usable_cpus()} for service and clients",
        variant="softmax, cpu, float32",
        shapes=", ".join(f"{name} {shape}" for name, shape in SHAPES.items()),
        seconds=f"{plan.seconds:g} for each cell, from {PROCESSES} client processes",
        warm_up=f"{WARM_UP} requests",
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith("QKV_")},
    )
    finish(Results("make bench", header, measure(plan)), PAGE, options)


if __name__ == "__main__":
    main()
