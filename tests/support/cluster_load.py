"""Clients of a cluster: with a new connection for each request, or one for many requests."""

from __future__ import annotations

import contextlib
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Final

import numpy as np

from qkv.client.request_builders import build_attend
from qkv.wire import safetensors
from support.kubelet import Endpoints, Pod
from support.processes import TIMEOUT_S
from support.service_processes import PATH

SHAPES: Final = {"small": (1, 2, 5, 4), "large": (1, 8, 256, 64)}
KINDS: Final = [(size, is_kept) for size in SHAPES for is_kept in (False, True)]
"""Size of the requests of a client, and True if it keeps its connections."""
PAUSES_S: Final = ((0, 0.005, 0.02, 0.1), (0.1, 0.5, 1, 2))
"""Seconds between the requests of a client. With long ones its connection is idle at a stop."""


class Call:
    """A request of softmax attention, and its output in float64."""

    def __init__(self, size: str) -> None:
        draw = np.random.default_rng(0)
        names = ("query", "key", "value")
        arrays = {n: draw.normal(size=SHAPES[size]).astype(np.float32) for n in names}
        call = build_attend("softmax", None, ["output"], "none", arrays)
        self.headers, self.body = dict(call.headers), call.content
        query, key, value = (arrays[n].astype(np.float64) for n in names)
        weights = np.exp(query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]))
        self._output = weights / weights.sum(-1, keepdims=True) @ value

    def is_right(self, body: bytes) -> bool:
        """Returns True if a response has the output, to a hundred roundings of float32."""
        tensor = safetensors.decode(body, "outputs").tensors["output"]
        found = np.frombuffer(tensor.data, np.float32).reshape(self._output.shape)
        return bool(np.abs(found - self._output).max() < 100 * np.finfo(np.float32).eps)


@dataclass
class Seen:
    """Results of all clients.

    Attributes:
        counts: responses by the kind of client. Of pods after SIGTERM also `last`, the responses
            that end a connection, and `closed`, the requests whose kept connection was closed
            before a byte of a response.
        faults: lost, refused and wrong ones.
    """

    counts: Counter[object] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Client:
    """A client that sends requests one after the other.

    Args:
        endpoints: the pods, which it sees after `delay_s`.
        delay_s: the delay.
        size: size of its requests.
        is_kept: True if it keeps its connection until the service closes it.
        pauses_s: seconds between two requests, one of which it draws.
        seed: of its choices.
        seen: receives the results.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        delay_s: float,
        size: str,
        is_kept: bool,
        pauses_s: Sequence[float],
        seed: int,
        seen: Seen,
    ) -> None:
        self._endpoints, self._delay_s = endpoints, delay_s
        self._kind, self._call = (size, is_kept), Call(size)
        self._pauses_s, self._draw, self._seen = pauses_s, random.Random(seed), seen
        self._pod: Pod | None = None
        self._connection: HTTPConnection | None = None

    def run(self, ended: threading.Event) -> None:
        """Sends requests until an event."""
        while not ended.is_set():
            while not self._send():
                pass  # again, on a new connection
            time.sleep(self._draw.choice(self._pauses_s))
        self._close()

    def _send(self) -> bool:
        """Sends a request; returns False if it must be sent again (RFC 9112, section 9.3.1).

        As connection pools do, it uses no connection that is already closed.
        """
        if self._connection is not None and select.select([self._connection.sock], [], [], 0)[0]:
            self._close()
        is_new = self._connection is None
        if self._connection is None:
            while not (pods := self._endpoints.seen(self._delay_s)):
                time.sleep(0.05)  # a proxy without endpoints
            self._pod = self._draw.choice(pods)
            self._connection = HTTPConnection("127.0.0.1", self._pod.port, timeout=TIMEOUT_S)
        assert self._pod is not None
        try:
            self._connection.request("POST", PATH, self._call.body, self._call.headers)
            response = self._connection.getresponse()
        except ConnectionError as error:
            is_right = self._pod.is_stopping and not is_new
            return self._end("closed", error, is_right)
        except Exception as error:
            return self._end("lost", error, is_right=False)
        try:
            body = response.read()
        except Exception as error:
            return self._end("cut", error, is_right=False)
        if response.status != 200 or not self._call.is_right(body):
            self._seen.faults.append(f"{response.status} {body[:200]!r}")
        self._seen.counts[self._kind] += 1
        if response.will_close:
            self._seen.counts["last"] += self._pod.is_stopping
        if response.will_close or not self._kind[1]:
            self._close()
        return True

    def _end(self, name: str, error: Exception, is_right: bool) -> bool:
        """Ends the connection of a request without a complete response; returns False."""
        assert self._pod is not None
        self._seen.counts[name] += 1
        if not is_right:
            self._seen.faults.append(
                f"{name}: {error!r} ({self._kind}, "
                f"terminating: {self._pod.is_terminating}, SIGTERM: {self._pod.is_stopping})"
            )
        self._close()
        return False

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@contextlib.contextmanager
def load(endpoints: Endpoints, longest_delay_s: float, seed: int) -> Iterator[Seen]:
    """Runs two clients of each kind, with short and with long pauses; yields their results."""
    draw, seen, ended = random.Random(seed), Seen(), threading.Event()
    clients = [
        Client(
            endpoints, draw.uniform(0, longest_delay_s), *kind, pauses_s, draw.getrandbits(32), seen
        )
        for kind in KINDS
        for pauses_s in PAUSES_S
    ]
    with ThreadPoolExecutor(len(clients)) as pool:
        loops = [pool.submit(client.run, ended) for client in clients]
        try:
            yield seen
        finally:
            ended.set()
        for loop in loops:
            loop.result(TIMEOUT_S)
