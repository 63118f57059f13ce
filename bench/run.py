"""Measures the cost of a request: beside bare torch, with many clients, with weights, by size.

Every response is compared with the correct one.

    python bench/run.py [--seconds 2] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import explicit
import torch
from bodies import FORMATS, SHAPES, asked, tensors_of
from load import PROCESSES, WARM_UP, load
from run_page import (
    BARE,
    Bare,
    Clients,
    Connections,
    Explicit,
    Figures,
    Size,
    Weights,
    tables,
    write,
)
from service import Service, serving

import qkv
from qkv.server.process import usable_cpus

REST_S: Final = 0.3  # longer than OpenMP threads spin
TEXT: Final = "JSON, lists"
MOST_TEXT: Final = 16  # clients at L: 64 would hold 2 GiB of text
SIZES: Final = tuple(4**n for n in range(5, 15))  # 1 KiB to 256 MiB
WIDTH: Final = 32  # width of the one query; its many keys make the body large


class Plan(NamedTuple):
    """Cells to measure; `seconds` is the time of each."""

    seconds: float = 2.0
    bursts: int = 5
    shapes: tuple[str, ...] = tuple(SHAPES)
    clients: tuple[int, ...] = (1, 16, 64)
    sizes: tuple[int, ...] = SIZES
    connections: tuple[int, ...] = (1, 4, 16, 64, 256, 512)


QUICK: Final = Plan(0.1, 1, ("S",), (1, 4), (4**11,), (16,))


def bare(service: Service, plan: Plan) -> Iterator[Bare]:
    """Measures one client and the bare call, in short alternating bursts.

    A slow moment of the machine then affects all of them. A pause separates bursts, because threads
    of the last call continue to spin.
    """
    ways = {f"{BARE}, {n} thread{'s' * (n > 1)}": n for n in (1, usable_cpus())}
    for shape in plan.shapes:
        tensors = tensors_of(SHAPES[shape])
        requests = {form: asked(service.address, form, tensors) for form in FORMATS}
        times: dict[str, list[float]] = {who: [] for who in (*ways, *FORMATS)}
        seconds = plan.seconds / plan.bursts
        for _ in range(plan.bursts):
            for who, threads in ways.items():
                torch.set_num_threads(threads)
                time.sleep(REST_S)
                times[who] += _called(tensors, seconds)
            time.sleep(REST_S)
            for form, request in requests.items():
                answers = load(service.address, request, seconds).answers
                times[form] += [answer.ms for answer in answers]
        yield from (Bare(shape, who, values) for who, values in times.items())


def _called(tensors: dict[str, torch.Tensor], seconds: float) -> list[float]:
    """Returns the milliseconds of each bare call, after a warm-up."""
    (q, k, v), times = tensors.values(), []
    with torch.inference_mode():
        for _ in range(WARM_UP):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
            times.append((time.perf_counter() - started) * 1e3)
    return times


def clients(service: Service, plan: Plan) -> Iterator[Clients]:
    """Measures clients that send requests at the same time."""
    for shape in plan.shapes:
        for form in FORMATS:
            request = asked(service.address, form, tensors_of(SHAPES[shape]))
            for count in plan.clients:
                if form == TEXT and shape == "L" and count > MOST_TEXT:
                    continue
                came = load(service.address, request, plan.seconds, count)
                yield Clients(shape, form, count, came, service.resident)


def weights(service: Service, plan: Plan) -> Iterator[Weights | Explicit]:
    """Measures full weights at M, beside explicit attention in processes without other work."""
    cpus = usable_cpus()
    for processes, threads in dict.fromkeys([(1, 1), (1, cpus), (cpus, 1)]):
        rate = explicit.rate(SHAPES["M"], plan.seconds, processes, threads)
        yield Explicit(processes, threads, rate)
    for form in ("V2 binary", "safetensors"):
        request = asked(service.address, form, tensors_of(SHAPES["M"]), weights=True)
        for count in plan.clients:
            yield Weights(form, count, load(service.address, request, plan.seconds, count))


def connections(service: Service, plan: Plan) -> Iterator[Connections]:
    """Measures open connections at S: requests on one after the other, then on all at once."""
    request = asked(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    for count in plan.connections:
        with service.watched() as memory:
            in_turn = load(service.address, request, plan.seconds, count, at_once=1)
            at_once = load(service.address, request, plan.seconds, count)
        yield Connections(count, in_turn, at_once, memory)


def sizes(service: Service, plan: Plan) -> Iterator[Size]:
    """Measures bodies of each size: one query of one head, and as many keys as fit.

    The body grows, the response does not, and the attention reads each number once. The smallest
    size is measured again at the end.
    """
    for size in (*plan.sizes, plan.sizes[0]):
        tensors = tensors_of((1, 1, 1, WIDTH), keys_in(size))
        request = asked(service.address, "V2 binary", tensors, size=size)
        with service.watched() as memory:
            came = load(service.address, request, plan.seconds)
        yield Size(size, came, memory)


def keys_in(size: int) -> int:
    """Returns the number of float32 keys and values that fit beside 1 KiB of JSON and query."""
    return max(1, (size - 1024) // (2 * 4 * WIDTH))


def measure(plan: Plan) -> Figures:
    """Measures everything: the first three tables on one service, the others on a new one.

    The memory that remains in the new service then belongs to the other tables.
    """
    with serving() as service:
        costs, rates = list(bare(service, plan)), list(clients(service, plan))
        kept = list(weights(service, plan))
    with serving() as service:
        _warm(service)
        by_connections = list(connections(service, plan))
        by_size = list(sizes(service, plan))
    return Figures(costs, rates, kept, by_connections, by_size)


def _warm(service: Service) -> None:
    """Sends requests to every worker: code loaded by the first one is no growth of memory."""
    request = asked(service.address, "V2 binary", tensors_of(SHAPES["S"]))
    load(service.address, request, 0.0, connections=4 * service.workers)


def main() -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each cell")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    plan = QUICK if given.quick else Plan()
    plan = plan._replace(seconds=given.seconds or plan.seconds)
    cpus = usable_cpus()
    set_to = "".join(
        f", {name}={os.environ[name]}" for name in sorted(os.environ) if name[:4] == "QKV_"
    )
    about = (
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {cpus} CPUs for service and clients{set_to}; softmax, cpu, "
        f"float32. S is {SHAPES['S']}, M {SHAPES['M']}, L {SHAPES['L']}. {plan.seconds:g} s per "
        f"cell after {WARM_UP} warm-up requests, from {PROCESSES} client processes; every response "
        "is checked."
    )
    started = time.monotonic()
    figures = measure(plan)
    made = tables(about, figures)
    print("\n\n".join(made.values()) + f"\n{time.monotonic() - started:.0f} s")
    if given.write:
        write(made)


if __name__ == "__main__":
    main()
