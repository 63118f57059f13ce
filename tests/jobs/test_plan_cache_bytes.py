"""Caches of plans count the bytes that their entries hold, and bound them, in each process."""

from __future__ import annotations

import gc
import itertools
import string
import tracemalloc
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from qkv.engine.executor import execute
from qkv.engine.remote.job_memory import layouts_of, read_inputs, write_inputs
from qkv.jobs.job import Job
from qkv.jobs.loaded.loaded_layers import NO_LAYERS
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import BoundedCache, PlanCache
from qkv.jobs.plan_description import KnownPlans, describe
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import CPU, LIMITS

MIB: Final = 1 << 20
WEIGHT: Final = RawTensor.from_numpy(np.ones((4, 4), np.float32))
BIAS: Final = RawTensor.from_numpy(np.ones(4, np.float32))
EMBEDDING: Final = RawTensor.from_numpy(np.ones((1, 2, 4), np.float32))


def with_layer(layout: str, tensors: dict[str, RawTensor]) -> Message:
    return Message({"layer": {"layout": layout, "heads": 2}}, {"x": EMBEDDING}, tensors)


def plain(number: int, **fields: object) -> Message:
    raw = RawTensor.from_numpy(np.ones((1, 1, 600 + number, 2), np.float32))
    return Message(dict(fields), dict.fromkeys(("query", "key", "value"), raw))


def with_rows(number: int) -> Message:
    return plain(600, weights={"rows": [300 + (number * k) % 800 for k in range(190)]})


def with_more_rows(number: int) -> Message:
    """Returns a request whose fields are too long for a plan in the worker."""
    return plain(600, weights={"rows": [1000 + (number * k) % 200 for k in range(700)]})


def with_biases(number: int) -> Message:
    roles = [f"{number}.self_attn.{role}_proj" for role in "qkvo"]
    weights = {f"{role}.weight": WEIGHT for role in roles}
    return with_layer("llama", weights | {f"{role}.bias": BIAS for role in roles})


def with_wide_name(number: int) -> Message:
    """Returns a layer of one tensor, in whose name each character takes four bytes."""
    raw = RawTensor.from_numpy(np.ones((4, 12), np.float32))
    return with_layer("gpt2", {f"\N{GRINNING FACE}{'a' * 900}{number}.c_attn.weight": raw})


def with_ignored(count: int, number: int) -> Message:
    """Returns a layer with tensors that it ignores: names of two characters, large sizes."""
    letters = string.ascii_letters + string.digits
    pairs = itertools.islice(itertools.product(letters, letters), count)
    others = {
        "".join(pair): RawTensor("float32", (300 + number, 0), memoryview(b"")) for pair in pairs
    }
    return with_layer("v1", {f"W_{r}": WEIGHT for r in ("query", "key", "value")} | others)


def with_few_ignored(number: int) -> Message:
    return with_ignored(300, number)


KINDS: Final = (
    plain, with_rows, with_more_rows, with_biases, with_wide_name, with_few_ignored,
)  # fmt: skip


class Process:
    """The caches that a request passes, in a worker and in the device process."""

    def __init__(self) -> None:
        self.plans, self.of_device = PlanCache(LIMITS), KnownPlans(NO_LAYERS)

    def send(self, message: Message) -> None:
        """Sends a request until its job is decoded."""
        job = self.plans.new_job(Plan, "softmax", message)
        memory = np.zeros(layouts_of(job.plan).input_bytes, np.uint8)
        write_inputs(job, memory)
        plan = self.of_device.find(*job.plan.derived(describe))
        assert plan is not None
        execute([Job(plan, *read_inputs(plan, memory))], CPU, False)

    @property
    def held_bytes(self) -> int:
        """Bytes that the caches hold, as they count them."""
        return self.plans.held_bytes + self.of_device.held_bytes


def growth(make: Callable[[int], Message], count: int) -> tuple[int, int]:
    """Returns the bytes that requests left behind, and those that the caches count."""
    Process().send(make(1000))  # what the first request of a process prepares
    caches = Process()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        caches.send(make(number))
    gc.collect()
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return left, caches.held_bytes


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS)
def test_caches_count_at_least_what_their_entries_hold(make: Callable[[int], Message]) -> None:
    left, counted = growth(make, 8)
    assert 8 << 10 < left < counted


@pytest.mark.slow
def test_thousands_of_short_names_leave_nothing_behind() -> None:
    """A plan of such a request would hold 0.9 MiB."""
    left, _ = growth(lambda number: with_ignored(3800, number), 3)
    assert left < MIB


@pytest.mark.slow
@pytest.mark.representative
def test_caches_are_bounded_in_bytes() -> None:
    caches = Process()
    for number in range(120):
        caches.send(with_more_rows(number))
        caches.send(with_few_ignored(number))
        assert caches.plans.held_bytes <= 32 * MIB
        assert caches.of_device.held_bytes <= 64 * MIB
    assert caches.plans.held_bytes > 31 * MIB


def test_cache_drops_the_oldest_values_for_a_large_one() -> None:
    cache: BoundedCache[int] = BoundedCache(640)
    for key in range(64):
        cache.put(key, key, 10)
    assert (len(cache), cache.held_bytes) == (64, 640)
    cache.put("other", 0, 10)
    assert [key for key in range(64) if cache.get(key) is None] == [0]
    cache.put("large", 0, 11)  # more than a part in 64
    assert cache.get("large") is None
    cache.put("other", 1, 5)
    assert (cache.get("other"), cache.held_bytes) == (1, 635)
