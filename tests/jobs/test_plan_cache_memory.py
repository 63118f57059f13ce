"""Plans keep nothing of a body, take bounded memory, and are shared by threads.

Caches of plans count the bytes that their entries hold, in a worker and in a device process.
"""

from __future__ import annotations

import gc
import itertools
import string
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.engine.executor import execute
from qkv.engine.remote.job_memory import layouts_of, read_inputs, write_inputs
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.loaded.loaded_layers import NO_LAYERS
from qkv.jobs.plan import Plan
from qkv.jobs.plan_cache import BoundedCache, PlanCache
from qkv.jobs.plan_description import KnownPlans, describe
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import CPU, LIMITS
from support.fitting_requests import Fitting, decode_document, with_other_numbers
from support.raw_connection import random_inputs

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


@pytest.fixture(scope="module", autouse=True)
def _what_exists_stays() -> None:
    """Hides it from the collections of garbage here, a hundred of a third of a second each."""
    gc.collect()
    gc.freeze()


def test_cache_drops_the_oldest_values_for_a_large_one() -> None:
    cache: BoundedCache[int] = BoundedCache(640)
    for key in range(64):
        cache.put(key, key, 10)
    assert (len(cache), cache.held_bytes) == (64, 640)
    cache.put("other", 0, 10)
    assert [key for key in range(64) if cache.get(key) is None] == [0]
    assert cache.get("other") == 0  # in use, as 1 is, and so not dropped
    assert cache.get(1) == 1
    cache.put("another", 0, 10)
    assert [key for key in range(64) if cache.get(key) is None] == [0, 2]
    cache.put("large", 0, 11)  # more than a part in 64
    assert cache.get("large") is None
    cache.put("other", 1, 5)
    assert (cache.get("other"), cache.held_bytes) == (1, 635)


def new_message(seed: int, length: int = 4, **fields: Any) -> Message:
    arrays = random_inputs(seed, (1, 1, length, 2))
    return Message(fields, {n: RawTensor.from_numpy(a) for n, a in arrays.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(variants()))
@pytest.mark.parametrize("kind", [Plan, GradientPlan])
def test_nothing_of_a_body_is_kept(name: str, kind: type[Plan]) -> None:
    plans = PlanCache(LIMITS)

    def run(seed: int) -> list[weakref.ref[Any]]:
        group = "attention" if kind is Plan else "gradients"
        message = decode_document(Fitting(f"/v1/{group}/{name}", seed).document({}))
        message = with_other_numbers(message, seed)
        arrays = [t.numpy() for t in (*message.tensors.values(), *message.layer.values())]
        alive = [weakref.ref(a.base if isinstance(a.base, np.ndarray) else a) for a in arrays]
        for _ in range(2):  # without and with a plan
            execute([plans.new_job(kind, name, message)], CPU, False)
        return alive

    alive = [ref for seed in range(6) for ref in run(seed)]
    gc.collect()
    assert len(alive) >= 6
    assert not any(ref() is not None for ref in alive)
    assert len(plans) >= 1


@pytest.mark.slow
def test_long_fields_are_not_kept() -> None:
    plans = PlanCache(LIMITS)
    rows = [0, 1, 2, 3] * 1000
    for _ in range(2):
        job = plans.new_job(Plan, "softmax", new_message(0, weights={"rows": rows}))
        assert job.plan.output_shape("weights")
    assert not len(plans)


@pytest.fixture
def _threads_switch_often() -> Any:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Runs `work` in threads at the same time; raises the first error."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_switch_often")
def test_cache_stays_bounded_under_threads() -> None:
    cache: BoundedCache[int] = BoundedCache(1 << 10)

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for key in random.integers(0, 120, 30_000).tolist():
            if (value := cache.get(key)) is None:
                cache.put(key, key + 1, 16)
            else:
                assert value == key + 1

    in_threads(work)
    assert len(cache) <= 64


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_share_plans() -> None:
    plans = PlanCache(LIMITS, 1 << 20)

    def work(number: int) -> None:
        for turn in range(400):
            message = new_message(number, 1 + turn % 200)
            job = plans.new_job(Plan, "softmax", message)
            assert {n: bytes(t.data) for n, t in job.tensors.items()} == {
                n: bytes(t.data) for n, t in message.tensors.items()
            }
            assert job.plan.inputs.axes.sizes["L"] == 1 + turn % 200

    in_threads(work)
    assert 50 < len(plans) < 180
