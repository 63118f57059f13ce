"""Plans keep nothing of a body, take bounded memory, and are shared by threads."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qkv.attention.catalogue import variants
from qkv.engine.executor import execute
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.plan_cache import BoundedCache, PlanCache
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.engines import CPU, LIMITS
from support.fitting_requests import Fitting, decode_document, with_other_numbers
from support.raw_connection import random_inputs


def new_message(seed: int, length: int = 4, **fields: Any) -> Message:
    arrays = random_inputs(seed, (1, 1, length, 2))
    return Message(fields, {n: RawTensor.from_numpy(a) for n, a in arrays.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(variants()))
@pytest.mark.parametrize("kind", [Plan, GradientPlan])
def test_nothing_of_a_body_is_kept(name: str, kind: type[Plan]) -> None:
    plans, freed = PlanCache(LIMITS), 0

    def run(seed: int) -> list[weakref.ref[Any]]:
        group = "attention" if kind is Plan else "gradients"
        message = decode_document(Fitting(f"/v1/{group}/{name}", seed).document({}))
        message = with_other_numbers(message, seed)
        arrays = [t.numpy() for t in (*message.tensors.values(), *message.layer.values())]
        alive = [weakref.ref(a.base if isinstance(a.base, np.ndarray) else a) for a in arrays]
        for _ in range(2):  # without and with a plan
            execute([plans.new_job(kind, name, message)], CPU, False)
        return alive

    for seed in range(6):
        alive = run(seed)
        gc.collect()
        freed += len(alive)
        assert not any(ref() is not None for ref in alive)
    assert freed >= 6
    assert len(plans) >= 1


@pytest.mark.slow
def test_plans_that_were_not_used_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 1 << 20
    plans, validate, validated = PlanCache(LIMITS, room), Plan.from_message, list[int]()

    def counted(variant: str, message: Message, limits: Limits) -> Plan:
        validated.append(message.tensors["query"].shape[-2])
        return validate(variant, message, limits)

    monkeypatch.setattr(Plan, "from_message", counted)
    for length in range(1, 300):
        plans.new_job(Plan, "softmax", new_message(0, length))
        plans.new_job(Plan, "softmax", new_message(0, 1))  # in use, and so not dropped
    count = len(plans)
    assert 50 < count < 250
    assert plans.held_bytes <= room
    assert validated == [*range(1, 300)]
    for length in (*range(301 - count, 300), 1, 300 - count):
        plans.new_job(Plan, "softmax", new_message(0, length))
    assert validated == [*range(1, 300), 300 - count]


@pytest.mark.slow
def test_long_fields_are_not_kept() -> None:
    plans = PlanCache(LIMITS)
    rows = [0, 1, 2, 3] * 1000
    for _ in range(2):
        job = plans.new_job(Plan, "softmax", new_message(0, weights={"rows": rows}))
        assert job.plan.output_shape("weights")
    assert not len(plans)


@pytest.mark.slow
def test_plan_of_thousands_of_tensors_is_not_kept() -> None:
    plans = PlanCache(LIMITS)
    embedding = {"x": RawTensor.from_numpy(np.ones((1, 2, 4), np.float32))}
    weight = RawTensor.from_numpy(np.ones((4, 4), np.float32))
    layer = {f"W_{role}": weight for role in ("query", "key", "value")}
    others = {f"layers.{i}.mlp.up_proj.weight": weight for i in range(4000)}
    for tensors, kept in ((layer | others, 0), (layer, 1)):
        message = Message({"layer": {"layout": "v1"}}, embedding, tensors)
        for _ in range(2):
            assert len(plans.new_job(Plan, "softmax", message).layer.tensors) == 3  # type: ignore[union-attr]
        assert len(plans) == kept


@pytest.mark.slow
def test_plans_take_little_memory() -> None:
    """The longest fields that are kept, in 2048 plans: at most 32 MiB."""
    plans, count = PlanCache(LIMITS), 200
    plans.new_job(Plan, "softmax", new_message(0, 3, weights={"rows": [0]}))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        digits = [int(digit) for digit in f"{number:010b}"]
        plans.new_job(Plan, "softmax", new_message(0, 3, weights={"rows": digits + [0, 1] * 200}))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(plans) == count + 1
    assert held / count * 2048 < 32 << 20


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
