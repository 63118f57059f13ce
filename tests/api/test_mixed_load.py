"""240 concurrent mixed requests: every response is correct, with the bits of a single request."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import httpx
import numpy as np
import pytest

from support.known_requests import Case, assert_problem, random_case
from support.processes import TIMEOUT_S
from support.service import Server, running_server

THREADS: Final = 16
KINDS: Final = 30  # of shapes, dtypes and parameters
OF_EACH: Final = 8


@functools.cache
def cases() -> list[Case]:
    """Requests in an order in which equal batch keys are both adjacent and far apart."""
    drawn = [random_case(kind, seed) for kind in range(KINDS) for seed in range(OF_EACH)]
    # half are sent as lists, half as base64
    drawn = [replace(c, encoding=("lists", "base64")[i % 2]) for i, c in enumerate(drawn)]
    order = np.random.default_rng(0).permutation(len(drawn) // 4)
    return [drawn[4 * i + j] for i in order for j in range(4)]


HEAD: Final = (
    b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
)


@functools.cache
def bodies() -> list[bytes]:
    """The cases as JSON with base64."""
    return [json.dumps(case.document | {"encoding": "base64"}).encode() for case in cases()]


@contextmanager
def open_client(server: Server) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=THREADS)
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as http:
        yield http


def ask(http: httpx.Client, body: bytes) -> Any:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/attention/softmax", content=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Any]:
    """The outputs of each request, sent alone."""
    return [ask(server.http, body)["outputs"] for body in bodies()]


@pytest.fixture(scope="module")
def batching(_clean_environment: None) -> Iterator[Server]:
    """A service that batches requests as with a GPU."""
    with running_server(max_batch=32) as served:
        yield served


@pytest.mark.slow
def test_every_response_is_correct(alone: list[Any]) -> None:
    for case, outputs in zip(cases(), alone, strict=True):
        case.check(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_concurrent_requests_have_the_bits_of_single_ones(
    server: Server, alone: list[Any], order: int
) -> None:
    """Half of them in this order, the others in the reverse one."""
    some = slice(None, None, 2 * order)
    with open_client(server) as http, ThreadPoolExecutor(THREADS) as pool:
        for outputs, response in zip(
            alone[some], pool.map(lambda b: ask(http, b), bodies()[some]), strict=True
        ):
            assert response["outputs"] == outputs
            assert response["timing"]["batch_size"] == 1


@pytest.mark.slow
def test_batched_requests_have_the_bits_of_single_ones(batching: Server, alone: list[Any]) -> None:
    """The device is blocked while requests arrive, so that they are batched."""
    sizes: list[int] = []
    with open_client(batching) as http, ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(bodies()), THREADS):
            wave = slice(start, start + THREADS)
            with batching.hold():
                futures = [pool.submit(ask, http, body) for body in bodies()[wave]]
                batching.wait_until_queued(len(futures))
            responses = [future.result() for future in futures]
            for case, outputs, response in zip(cases()[wave], alone[wave], responses, strict=True):
                assert response["outputs"] == outputs, str(case)
            sizes += [response["timing"]["batch_size"] for response in responses]
    assert len(sizes) == len(cases())
    assert max(sizes) >= 4  # four requests in a batch
    assert batching.queued_count == 0


@pytest.mark.slow
def test_errors_and_disconnects_do_not_affect_other_requests(
    batching: Server, alone: list[Any]
) -> None:
    """Other requests fail, or their clients disconnect."""
    some = range(0, len(bodies()), 12)
    stop = threading.Event()

    def disturb(number: int) -> int:
        count = 0
        with httpx.Client(base_url=batching.url, timeout=TIMEOUT_S) as http:
            while not stop.is_set():
                body = bodies()[(number + 7 * count) % len(bodies())]
                if number % 2:
                    assert_problem(http.post("/v1/attention/softmax", content=body[:-9]), 400)
                else:
                    with socket.create_connection(batching.address, TIMEOUT_S) as connection:
                        connection.sendall(HEAD % len(body) + body)
                count += 1
        return count

    with open_client(batching) as http, ThreadPoolExecutor(THREADS) as pool:
        disturbing = [pool.submit(disturb, number) for number in range(4)]
        try:
            for i, response in zip(
                some, pool.map(lambda i: ask(http, bodies()[i]), some), strict=True
            ):
                assert response["outputs"] == alone[i]
        finally:
            stop.set()
        assert all(future.result() for future in disturbing)
    batching.wait_until_queued(0)
    assert batching.http.get("/readyz").is_success
