"""Faults in the engine: of a job, of the queue, of memory; it goes on, and all are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import qkv.engine.engine
from qkv.engine.engine import Answer, Engine
from qkv.engine.executor import Ran, run
from qkv.errors import Internal, InvalidContent, NotNow, QkvError, TooLarge
from qkv.jobs.job import Job
from support.engines import bits, plain, with_engine


@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_failing_job_fails_alone(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """One of thirty-two: all others answer, with the bits that they always have."""
    jobs = [plain(seed) for seed in range(32)]
    runs: list[int] = []

    def failing(batch: Sequence[Job], *how: Any) -> list[Ran]:
        runs.append(len(batch))
        if jobs[place] in batch:
            raise RuntimeError("marked")
        return run(batch, *how)

    async def test(engine: Engine) -> None:
        alone = [await engine.submit(job) for job in jobs]
        monkeypatch.setattr(qkv.engine.engine, "run", failing)
        with engine.hold():
            futures = [engine.submit(job) for job in jobs]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        for i, (one, answer) in enumerate(zip(alone, answers, strict=True)):
            if i == place:
                assert isinstance(answer, Internal)
                assert "marked" not in answer.detail  # nothing of the inside
            else:
                assert isinstance(answer, Answer)
                assert bits(answer) == bits(one)

    with_engine(test)
    assert runs[0] == 32
    assert len(runs) == 11  # halved five times: the rest of each half runs once


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("x"), Internal),
        (AssertionError("x"), Internal),
        (StopIteration(), Internal),
        (SystemExit(1), Internal),
        (KeyboardInterrupt(), Internal),
        (GeneratorExit(), Internal),
        (asyncio.CancelledError(), Internal),
        (MemoryError(), NotNow),
        (torch.OutOfMemoryError("x"), NotNow),
        (InvalidContent("said by the variant"), InvalidContent),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_the_thread_survives(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: type[Exception]
) -> None:
    def failing(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        raise error

    async def test(engine: Engine) -> None:
        good = bits(await engine.submit(plain(1)))
        with monkeypatch.context() as patch:
            patch.setattr(qkv.engine.engine, "run", failing)
            with engine.hold():
                futures = [engine.submit(plain(seed)) for seed in range(5)]
            answers = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(a) for a in answers] == [expected] * 5
        assert engine.alive
        assert engine.ready
        assert bits(await engine.submit(plain(1))) == good

    with_engine(test)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_the_loop_survives_what_runs_on_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A small job runs on the loop itself, which such an exception would end, and the process."""

    def failing(*_: Any) -> Any:
        raise error

    async def test(engine: Engine) -> None:
        job = plain(1)
        assert engine.runs_now(job)
        standing: Any = SimpleNamespace(job=job, run=failing)
        with monkeypatch.context() as patch:
            patch.setattr(qkv.engine.engine, "run", failing)
            with pytest.raises(Internal, match="the computation failed"):
                engine.run_now(job)
            assert engine.run_standing(standing) is None
        assert engine.run_now(job) is not None

    with_engine(test)


def test_the_thread_survives_what_no_batch_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a fault of the engine's own bookkeeping is an answer to those who wait."""

    async def test(engine: Engine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(qkv.engine.engine, "run", lambda *_: [])
            with engine.hold():
                futures = [engine.submit(plain(seed)) for seed in range(2)]
            answers = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(a) for a in answers] == [Internal] * 2
        await engine.submit(plain(1))

    with_engine(test)


def test_where_the_queue_itself_fails_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> list[Any]:
        raise RuntimeError("marked")

    async def test(engine: Engine) -> None:
        with engine.hold():
            futures = [engine.submit(plain(seed, length=3 + seed)) for seed in range(3)]
            monkeypatch.setattr(engine._queue, "take", failing)
        answers = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(a) for a in answers] == [Internal] * 3
        await engine.broken.wait()
        assert (engine.ready, engine.alive) == (False, True)
        with pytest.raises(NotNow):
            engine.submit(plain(1))

    with_engine(test)


def refuse(words: str) -> None:
    raise RuntimeError(words)


@pytest.mark.parametrize(
    ("allocate", "expected"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), TooLarge),
        (lambda: np.empty(1 << 60, np.uint8), TooLarge),
        (lambda: refuse("DefaultCPUAllocator: can't allocate memory: 64 bytes"), NotNow),
    ],
    ids=["torch", "numpy", "not now"],
)
def test_out_of_memory_as_it_is_said_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    allocate: Callable[[], object],
    expected: type[QkvError],
) -> None:
    """A plain RuntimeError of the allocator is no fault of ours, and may pass: not now. What is
    more than the machine has never will."""

    def greedy(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        allocate()
        raise AssertionError

    monkeypatch.setattr(qkv.engine.engine, "run", greedy)

    async def test(engine: Engine) -> None:
        with pytest.raises(expected, match="memory"):
            await engine.submit(plain(1))

    with_engine(test)
