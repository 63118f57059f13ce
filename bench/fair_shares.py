"""API keys that share a service: a flood of one beside another, and rates by share."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bodies import SHAPES, build_request, tensors_of
from load import BenchRequest, LoadResult, load
from service import Service, running_service
from tables import Cell, Table, percentile, spread

ALICE, BATCH = "alice-0123456789ab", "batch-0123456789ab"
KEYS: Final = f"alice:{ALICE}:3,batch:{BATCH}"
SHARE: Final = 3  # alice's, of batch's
SERVICES: Final = {
    "a worker for each CPU": {},
    "one worker": {"QKV_WORKERS": "1"},
    "device process": {"QKV_DEVICE_PROCESS": "one"},
}


def measure_fair_shares(seconds: float, flood: int, rounds: int) -> Table:
    """Measures one connection of S beside a flood of L of another key, and two floods of S.

    Args:
        seconds: of each cell.
        flood: connections of a key that sends much.
        rounds: how often each is measured; the cells give medians, and limits in brackets.
    """
    with running_service() as service:  # it has no keys: requests are built there
        small, large = (
            build_request(service.address, "V2 binary", tensors_of(SHAPES[size])) for size in "SL"
        )
    rows: list[list[Cell]] = []
    for name, settings in SERVICES.items():
        with running_service(QKV_API_KEYS=KEYS, **settings) as service:
            measured = [_measure(service, small, large, seconds, flood) for _ in range(rounds)]
        rows.append([name, *map(spread, zip(*measured, strict=True))])
    columns = ["service", "S beside 1 of L, p99 in ms", f"beside {flood} of L", "ratio"]
    columns += [f"rates at shares of {SHARE} to 1", "both, of one key's rate"]
    return Table("fair shares", columns, rows)


def _measure(
    service: Service, small: BenchRequest, large: BenchRequest, seconds: float, flood: int
) -> list[float]:
    """Returns the figures of a row."""
    waits = []
    for count in (1, flood):
        single, _ = _beside(service, small, large, count, seconds)
        waits.append(percentile([timing.latency_ms for timing in single.timings], 99))
    alone = load(service.address, _of(BATCH, small), seconds, 2 * flood).rate
    batch, alice = (result.rate for result in _beside(service, small, small, flood, seconds, flood))
    return [*waits, waits[1] / waits[0], alice / batch, (alice + batch) / alone]


def _beside(
    service: Service,
    one: BenchRequest,
    other: BenchRequest,
    other_connections: int,
    seconds: float,
    connections: int = 1,
) -> tuple[LoadResult, LoadResult]:
    """Sends the requests of batch, and for as long those of alice; returns both results."""
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(load, service.address, _of(ALICE, other), seconds, other_connections)
        result = load(service.address, _of(BATCH, one), seconds, connections)
        return result, beside.result()


def _of(key: str, request: BenchRequest) -> BenchRequest:
    headers = {**request.headers, "Authorization": f"Bearer {key}"}
    return dataclasses.replace(request, headers=headers)
