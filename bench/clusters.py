"""Measures qkv on Ray: requests per second by replicas, and short requests beside a long one.

Every response of the first table is compared with the expected bytes.

    python bench/clusters.py [--seconds 3] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import http.client
import platform
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import ray
import torch
from bodies import SHAPES, build_request, tensors_of
from haproxy_cluster import running_haproxy
from load import BenchRequest, load
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray_cluster import RayCluster, running_ray
from run_page import format_range, format_table, write_page
from service import running_service

import qkv
from qkv import Client
from qkv.server.process import usable_cpus
from qkv.server.ray_serve import Replica

PAGE: Final = Path(__file__).parents[1] / "docs" / "clusters.md"
FORMAT: Final = "V2 binary"
SERVE: Final = "`qkv serve`, 2 workers"
RAY: Final = "Ray"
HAPROXY: Final = "Ray with HAProxy"
_LONG: Final = (1, 4, 16384, 4)  # a few seconds of one thread
_SHORT: Final = (1, 2, 1024, 16)  # a few milliseconds, but too large to run on the event loop
_SHORT_CLIENTS: Final = 8
_START_S: Final = {
    "long": 0.0,
    "short": 1.0,
}  # so that no short one arrives with the first long one
_PAUSE_S: Final = {"long": 0.5, "short": 0.15}

Responses = Mapping[int, tuple[list[tuple[bytes, bytes]], bytes]]
"""Headers and body of a response, by the size of the request's body."""


class Plan(NamedTuple):
    """Cells to measure; `seconds` is the time of a round."""

    seconds: float = 3.0
    rounds: int = 3
    shapes: tuple[str, ...] = tuple(SHAPES)
    replicas: tuple[int, ...] = (1, 2, 3)
    haproxy_replicas: tuple[int, ...] = (1, 2)
    clients: int = 16
    router_seconds: float = 20.0
    router_rounds: int = 3


QUICK: Final = Plan(0.2, 1, ("S",), (1,), (1,), 2, 0.5, 1)


class RateResult(NamedTuple):
    """Requests per second of each round, for a shape."""

    row: str
    shape: str
    rates: list[float]


class RouterResult(NamedTuple):
    """Milliseconds of the short requests of a round, and the number of long ones."""

    by_flops: bool
    short_ms: list[float]
    long_count: int


class Workload(NamedTuple):
    """A request of each shape, and the responses of `qkv serve` to them."""

    requests: Mapping[str, BenchRequest]
    responses: Responses


class _BareApplication:
    """An ASGI application that reads the body and sends a response that qkv has sent before."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        size, is_whole = 0, False
        while not is_whole:
            message = await receive()
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        headers, body = self._responses[size]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Bare:
    """A replica of the bare application."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    def __serve_build_asgi_app__(self) -> _BareApplication:
        """Returns the application."""
        return _BareApplication(self._responses)


Bare: Final[Any] = serve.deployment(name="bare", max_ongoing_requests=256)(serve.ingress()(_Bare))
RayRouted: Final[Any] = Replica.options(request_router_config=RequestRouterConfig())
"""Replicas with Ray's own request router; HAProxy allows no other one."""


def measure_service(plan: Plan) -> tuple[Workload, list[RateResult]]:
    """Measures the service without Ray. Returns its requests and responses too."""
    with running_service(QKV_WORKERS="2") as service:
        requests = {
            shape: build_request(service.address, FORMAT, tensors_of(SHAPES[shape]))
            for shape in plan.shapes
        }
        responses = {len(r.body): _record(service.address, r) for r in requests.values()}
        rates = list(_measure(SERVE, service.address, requests, plan))
        return Workload(requests, responses), rates


def measure_replicas(
    cluster: RayCluster, proxy: str, replicas: Sequence[int], workload: Workload, plan: Plan
) -> Iterator[RateResult]:
    """Measures replicas behind a proxy, then a bare ASGI application."""
    for count in replicas:
        cluster.run(RayRouted if proxy == HAPROXY else Replica, count, device="cpu")
        row = f"{proxy}, {count} replica{'s' * (count > 1)}"
        yield from _measure(row, cluster.address, workload.requests, plan)
    serve.delete("default")
    cluster.run(Bare, 1, responses=workload.responses)
    row = f"{proxy}, a bare ASGI application"
    yield from _measure(row, cluster.address, workload.requests, plan)
    serve.delete("default")


def _measure(
    row: str, address: tuple[str, int], requests: Mapping[str, BenchRequest], plan: Plan
) -> Iterator[RateResult]:
    for shape, request in requests.items():
        rates = [
            load(address, request, plan.seconds, plan.clients).rate for _ in range(plan.rounds)
        ]
        yield RateResult(row, shape, rates)


def _record(
    address: tuple[str, int], request: BenchRequest
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Returns headers and body of a response."""
    connection = http.client.HTTPConnection(*address)
    try:
        connection.request("POST", request.path, request.body, dict(request.headers))
        response = connection.getresponse()
        headers = [(n.lower().encode(), v.encode()) for n, v in response.getheaders()]
        unique = [(n, v) for n, v in headers if n not in (b"date", b"server", b"x-request-id")]
        return unique, response.read()
    finally:
        connection.close()


def measure_routers(cluster: RayCluster, plan: Plan) -> Iterator[RouterResult]:
    """Measures short requests beside long ones, on two replicas, by turns with both routers."""
    for number in range(plan.router_rounds):
        for by_flops in (False, True):
            name = f"{'flops' if by_flops else 'count'}-{number}"
            cluster.run(Replica if by_flops else RayRouted, 2, name, device="cpu")
            yield RouterResult(by_flops, *_time_short_requests(cluster.url, plan.router_seconds))
            serve.delete(name)


def _time_short_requests(url: str, seconds: float) -> tuple[list[float], int]:
    """Returns the milliseconds of short requests beside long ones, and the number of these."""
    times_ms: dict[str, list[float]] = {"long": [], "short": []}
    ready = threading.Barrier(1 + _SHORT_CLIENTS)

    def send(kind: str, shape: tuple[int, ...]) -> None:
        array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        with Client(url) as client:
            client.attend("softmax", query=array, key=array, value=array, outputs=["output"])
            ready.wait()
            time.sleep(_START_S[kind])
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                client.attend("softmax", query=array, key=array, value=array, outputs=["output"])
                times_ms[kind].append((time.perf_counter() - start) * 1e3)
                time.sleep(_PAUSE_S[kind])

    kinds = [("long", _LONG), *[("short", _SHORT)] * _SHORT_CLIENTS]
    threads = [threading.Thread(target=send, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times_ms["short"], len(times_ms["long"])


def build_tables(
    about: str, rates: list[RateResult], routers: list[RouterResult]
) -> dict[str, str]:
    """Returns the texts by the names of their marks."""
    by_cell = {(r.row, r.shape): r.rates for r in rates}
    shapes = list(dict.fromkeys(r.shape for r in rates))
    rows = [
        [row, *(format_range(by_cell[row, shape]) for shape in shapes)]
        for row in dict.fromkeys(r.row for r in rates)
    ]
    rate_table = format_table(["requests/s", *shapes], rows)
    texts = {"about": about, "rates": rate_table, "routers": _build_routers(routers)}
    return {f"made by `make clusters`: {name}": text for name, text in texts.items()}


def _build_routers(results: list[RouterResult]) -> str:
    rows, p99s = [], {}
    for by_flops in (False, True):
        own = [r for r in results if r.by_flops == by_flops]
        p99s[by_flops] = [float(np.quantile(r.short_ms, 0.99)) for r in own]
        p50s = [statistics.median(r.short_ms) for r in own]
        counts = f"{sum(len(r.short_ms) for r in own)} / {sum(r.long_count for r in own)}"
        name = "operations to do (qkv)" if by_flops else "numbers of requests (Ray)"
        rows.append([name, format_range(p50s), format_range(p99s[by_flops]), counts])
    ratios = [b / a for a, b in zip(p99s[False], p99s[True], strict=True)]
    rows.append(["ratio", "", format_range(ratios), ""])
    header = ["router compares", "p50, ms", "p99, ms", "short / long requests"]
    return format_table(header, rows)


def main() -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each round")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    parser.add_argument("--write", action="store_true", help="write docs/clusters.md")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    plan = plan._replace(seconds=arguments.seconds or plan.seconds)
    about = (
        f"qkv {qkv.__version__}, Ray {ray.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {usable_cpus()} CPUs for service, "
        f"proxy and clients; softmax, cpu, float32, {FORMAT}, {plan.clients} clients. S is "
        f"{SHAPES['S']}, M {SHAPES['M']}, L {SHAPES['L']}. Each number is the median of "
        f"{plan.rounds} rounds of {plan.seconds:g} s, with the least and the largest in brackets."
    )
    workload, rates = measure_service(plan)
    with running_ray() as cluster:
        rates += measure_replicas(cluster, RAY, plan.replicas, workload, plan)
        routers = list(measure_routers(cluster, plan))
    with running_haproxy() as cluster:
        rates += measure_replicas(cluster, HAPROXY, plan.haproxy_replicas, workload, plan)
    tables = build_tables(about, rates, routers)
    print("\n\n".join(tables.values()))
    if arguments.write:
        write_page(tables, PAGE)


if __name__ == "__main__":
    main()
