"""Tests of the request router, with replicas that are only names."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from qkv.server.ray_serve.request_router import FlopsRouter


class Replicas:
    """A router and replicas that have these numbers of requests."""

    def __init__(self, **requests: int) -> None:
        # Ray's own router needs a cluster; the attributes are those that a subclass reads
        self.router = object.__new__(FlopsRouter)
        self.router.initialize_state()
        self.router._replicas = {name: SimpleNamespace(replica_id=name) for name in requests}
        self.router._replica_queue_len_cache = requests

    def choose(self, pending: Any = None) -> str:
        (best,), *_ = asyncio.run(self.router.choose_replicas([], pending))
        return str(best.replica_id)

    def send(self, id: str, size: int) -> tuple[Any, str]:
        """Chooses a replica for a request; returns both."""
        scope = {"headers": [(b"content-length", str(size).encode())]}
        pending = SimpleNamespace(
            args=[pickle.dumps(SimpleNamespace(asgi_scope=scope))],
            metadata=SimpleNamespace(internal_request_id=id),
            future=Future(),
        )
        return pending, self.choose(pending)


def test_request_goes_to_the_replica_with_fewer_operations() -> None:
    replicas = Replicas(a=0, b=1)
    _, busy = replicas.send("large", 4_000_000)
    assert busy == "a"
    for number in range(3):
        assert replicas.send(f"small {number}", 400_000)[1] == "b"
    replicas.router.on_request_completed("a", "large")
    assert replicas.choose() == "a"


def test_request_counts_for_the_replica_that_accepts_it() -> None:
    replicas = Replicas(a=0, b=1)
    pending, chosen = replicas.send("large", 4_000_000)
    replicas.router.on_request_routed(pending, "b", None)
    assert (chosen, replicas.choose()) == ("a", "a")
    replicas.router.on_request_completed("b", "large")
    replicas.router.on_request_routed(pending, "b", None)  # late
    assert replicas.send("next", 4_000_000)[1] == "a"
    assert replicas.choose() == "b"


def test_cancelled_and_answered_requests_do_not_count() -> None:
    replicas = Replicas(a=0, b=1)
    pending, _ = replicas.send("large", 4_000_000)
    pending.future.cancel()
    assert replicas.send("other", 4)[1] == "a"
    done, _ = replicas.send("done", 4)
    replicas.router.on_request_completed("b", "done")
    done.future.set_result(None)
    replicas.choose(done)
    assert not replicas.router._sent_flops["b"]  # too few to change a choice


def test_equal_operations_are_compared_by_requests() -> None:
    assert Replicas(a=1, b=0).choose() == "b"
    assert Replicas(a=1).choose() == "a"
