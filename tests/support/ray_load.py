"""Clients that send requests while replicas start, die and stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from qkv import Client
from support.clients import exact_softmax, numbers
from support.processes import wait_until


class Load:
    """Clients that send one kind of request until the end of the block, and check every response.

    Args:
        url: of the service.
        clients: number of clients.
        length: of the sequences, of which every weight is equal; 0: a small request.
        pause_s: between the requests of a client: without one, they take the CPU from replicas
            that start.

    Attributes:
        count: number of responses.
    """

    def __init__(self, url: str, clients: int, length: int = 0, pause_s: float = 0.02) -> None:
        self._url, self._pause_s, self._stop = url, pause_s, threading.Event()
        self._inputs = _long(length) if length else numbers()
        self._expected = self._inputs["value"].mean(2, keepdims=True)
        if not length:
            self._expected = exact_softmax(**self._inputs)
        self.count = 0
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run) for _ in range(clients)]

    def _run(self) -> None:
        with Client(self._url, retries=8) as client:
            while not self._stop.wait(self._pause_s):
                output = client.attend("softmax", **self._inputs, weights="none").output
                expected = np.broadcast_to(self._expected, output.shape)
                np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
                self.count += 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits; fails if a client has failed."""
        wait_until(lambda: any(c.done() for c in self._clients) or condition())
        assert not any(c.done() for c in self._clients), [
            c.exception() for c in self._clients if c.done()
        ]

    def wait_for_responses(self, count: int) -> None:
        """Waits for as many more."""
        least = self.count + count
        self.wait_until(lambda: self.count >= least)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for ended in self._clients:
            ended.result()


def _long(length: int) -> dict[str, Any]:
    """Returns a query, keys and values of this length; the output is the mean of the values."""
    shape = (1, 1, length, 4)
    ones = np.ones(shape, np.float32)
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return {"query": ones, "key": ones, "value": value}
