"""Measures qkv on Ray: requests per second by replicas, and short requests beside a long one.

Every response of the first table is compared with the expected bytes.

    PYTHONPATH=tests python bench/clusters.py [--seconds 3] [--quick] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from bodies import SHAPES, build_request, tensors_of
from load import BenchRequest, load
from ray import serve
from ray.serve.config import RequestRouterConfig
from service import running_service
from tables import (
    DOCS,
    Cell,
    Results,
    Table,
    add_options,
    describe_machine,
    finish,
    percentile,
    spread,
)

from qkv import Client
from qkv.server.process import usable_cpus
from qkv.server.ray_serve import Replica
from support.haproxy_cluster import running_haproxy
from support.ray_cluster import RayCluster, running_ray

PAGE: Final = DOCS / "ray.md"
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


def build_tables(rates: Sequence[RateResult], routers: Sequence[RouterResult]) -> list[Table]:
    """Returns the tables in the order of the page."""
    by_cell = {(r.row, r.shape): spread(r.rates) for r in rates}
    shapes = list(dict.fromkeys(r.shape for r in rates))
    rows: list[list[Cell]] = [
        [row, *(by_cell[row, shape] for shape in shapes)]
        for row in dict.fromkeys(r.row for r in rates)
    ]
    return [Table("rates", ["requests/s", *shapes], rows), _build_routers(routers)]


def _build_routers(results: Sequence[RouterResult]) -> Table:
    rows: list[list[Cell]] = []
    p99s = {}
    names = {False: "numbers of requests (Ray)", True: "operations to do (qkv)"}
    for by_flops, name in names.items():
        own = [r for r in results if r.by_flops == by_flops]
        p99s[by_flops] = [percentile(r.short_ms, 99) for r in own]
        counts = f"{sum(len(r.short_ms) for r in own)} / {sum(r.long_count for r in own)}"
        p50s = [statistics.median(r.short_ms) for r in own]
        rows.append([name, spread(p50s), spread(p99s[by_flops]), counts])
    ratios = [b / a for a, b in zip(p99s[False], p99s[True], strict=True)]
    rows.append(["ratio", None, spread(ratios), None])
    columns = ["router compares", "p50, ms", "p99, ms", "short / long requests"]
    return Table("routers", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each round")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    add_options(parser)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = plan._replace(seconds=options.seconds or plan.seconds)
    header = describe_machine(
        Ray=ray.__version__,
        CPUs=f"{usable_cpus()} for service, proxy and clients",
        variant=f"softmax, cpu, float32, {FORMAT}",
        clients=str(plan.clients),
        shapes=", ".join(f"{name} {shape}" for name, shape in SHAPES.items()),
        rounds=f"{plan.rounds} of {plan.seconds:g} s: median (least–largest)",
        warm_up="every connection in each round",
    )
    workload, rates = measure_service(plan)
    with running_ray() as cluster:
        rates += measure_replicas(cluster, RAY, plan.replicas, workload, plan)
        routers = list(measure_routers(cluster, plan))
    with running_haproxy() as cluster:
        rates += measure_replicas(cluster, HAPROXY, plan.haproxy_replicas, workload, plan)
    finish(Results("make clusters", header, build_tables(rates, routers)), PAGE, options)


if __name__ == "__main__":
    main()
