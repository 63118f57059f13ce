"""The engine on a real loop: batches, their bits, budgets, faults, and what timing says."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_requests import Request, requests
from tolerances import assert_within, bounds
from torch import Tensor

import qkv.engine
from qkv.arrays import to_raw
from qkv.attention import softmax
from qkv.engine import ANY_LOAD, Answer, Engine
from qkv.errors import Internal, InvalidContent, NotNow, QkvError, TooLarge
from qkv.job import Job, Limits
from qkv.message import Message
from qkv.queue import Load
from qkv.run import Ran, run
from qkv.tensors import RawTensor

T = TypeVar("T")

LIMITS: Final = Limits(answer=1 << 30, request=4 << 30)
CPU: Final = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def with_engine(test: Callable[[Engine], Awaitable[T]], **options: Any) -> T:
    """Runs a test with an engine of its own, which groups as one on a GPU would."""

    async def main() -> T:
        engine = Engine(CPU, **({"max_batch": 32, "threads": 2} | options))
        engine.start()
        try:
            return await test(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


class Held:
    """One engine for many examples, on one loop."""

    def __init__(self, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.engine = Engine(CPU, max_batch=32, threads=2, **options)
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.engine.start()

    def alone(self, jobs: Sequence[Job]) -> list[Answer]:
        """Each job's answer with nothing beside it."""

        async def each() -> list[Answer]:
            return [await self.engine.submit(job) for job in jobs]

        return self._runner.run(each())

    def together(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers of jobs that wait at the same time."""
        return self._runner.run(together(self.engine, jobs))

    def close(self) -> None:
        """Ends the thread and the loop."""
        self._runner.run(self.engine.stop())
        self._runner.close()


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    """Runs a group one by one, as on a CPU."""
    bench = Held()
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def stacked() -> Iterator[Held]:
    """Runs a group as one call, as on a GPU."""
    bench = Held(stack=True)
    yield bench
    bench.close()


async def together(engine: Engine, jobs: Sequence[Job]) -> list[Answer]:
    """Submits jobs while the device is held, so that those with equal keys are one group."""
    with engine.hold():
        futures = [engine.submit(job) for job in jobs]
    return await asyncio.gather(*futures)


def job_of(
    tensors: Mapping[str, Any],
    outputs: Sequence[str] = ("output", "weights"),
    layer: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Job:
    """A job as a request would make it."""
    fields: dict[str, Any] = {"parameters": parameters, "outputs": list(outputs)}
    layer_tensors = {}
    if layer is not None:
        fields["layer"] = {k: v for k, v in layer.items() if k != "tensors"}
        layer_tensors = {name: to_raw(t) for name, t in layer["tensors"].items()}
    raw = {name: to_raw(t) for name, t in tensors.items() if t is not None}
    return Job.of("softmax", Message(fields, raw, layer_tensors), LIMITS)


def job_from(request: Request, outputs: Sequence[str], rank: int = 4) -> Job:
    """The job of a drawn request, its tensors sent with fewer axes where that says the same."""
    query, key, value, mask, lengths = request.tensors()
    axes = {4: (), 3: (1,), 2: (0, 0)}[rank]

    def dropped(tensor: Tensor | None) -> Tensor | None:
        for axis in axes if tensor is not None else ():
            assert tensor is not None
            tensor = tensor.squeeze(axis)
        return tensor

    tensors = {"query": query, "key": key, "value": value, "mask": mask}
    sent = {name: dropped(t) for name, t in tensors.items()} | {"key_lengths": lengths}
    return job_of(sent, outputs, **request.parameters)


def plain(number: int = 0, length: int = 4, batch: int = 1, **parameters: Any) -> Job:
    """A small ordinary job; those of one length and these parameters share a batch."""
    generator = torch.Generator().manual_seed(number)
    names = ("query", "key", "value")
    tensors = {n: torch.randn(batch, 2, length, 8, generator=generator) for n in names}
    return job_of(tensors, **parameters)


def bits(answer: Answer) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All that an answer's outputs are."""
    return {n: (t.dtype, t.shape, bytes(t.data)) for n, t in answer.outputs.items()}


def tensor_of(raw: RawTensor) -> Tensor:
    """An output as a float64 or float32 tensor."""
    array = raw.numpy()
    return torch.from_numpy(array.astype(np.float32) if raw.dtype == "bfloat16" else array.copy())


OUTPUTS: Final = (("output",), ("output", "weights"), ("weights",), ("output", "weights", "scores"))


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Request], tuple[str, ...]]:
    """Requests whose keys are equal: other numbers, other batch sizes, other key lengths."""
    first = draw(requests())
    group = []
    for _ in range(draw(st.integers(2, 4))):
        B, lengths = draw(st.integers(1, 4)), None
        if first.key_lengths is not None:
            of = st.integers(0, first.S)
            lengths = tuple(draw(st.lists(of, min_size=B, max_size=B)))
        seed = draw(st.integers(0, 2**32 - 1))
        group.append(replace(first, B=B, key_lengths=lengths, seed=seed))
    return group, draw(st.sampled_from(OUTPUTS))


# ---------------------------------------------------------------- the same bits


@settings(max_examples=300, deadline=None)
@given(groups(), st.randoms(use_true_random=False))
def test_same_bits_alone_and_with_strangers(
    held: Held, group: tuple[list[Request], tuple[str, ...]], random: Any
) -> None:
    """Any shapes, dtypes and parameters; in any order; strangers of other keys in between."""
    members, outputs = group
    jobs = []
    for request in members:
        ranks = [4]
        if request.G * request.K == 1:
            ranks += [3] + [2] * (request.B == 1)
        jobs.append(job_from(request, outputs, random.choice(ranks)))
    assert len({job.key for job in jobs}) == 1
    strangers = [plain(seed) for seed in range(2)]
    order = random.sample(range(len(jobs) + 2), len(jobs) + 2)
    everyone = jobs + strangers
    alone = held.alone(jobs)
    found = held.together([everyone[i] for i in order])
    for i, answer in zip(order, found, strict=True):
        size = len(jobs) if i < len(jobs) else len(strangers)
        assert answer.timing["batch_size"] >= size  # more where a stranger's key is theirs
        if i < len(jobs):
            assert alone[i].timing["batch_size"] == 1
            assert bits(answer) == bits(alone[i])
            assert answer.timing["backend"] == alone[i].timing["backend"]


def layer_group(seed: int) -> list[Job]:
    """Jobs over one layer, as those over a saved layer are: the very same object."""
    random = np.random.default_rng(seed)
    layout = str(random.choice(["v1", "v2"]))
    M, G, K, D, E, L, S = (int(n) for n in random.choice([1, 2, 3, 5, 7, 16, 33], 7))
    G, K = min(G, 3), min(K, 3)
    dtype = np.dtype(random.choice(["float64", "float32", "float16"]))
    tensors = {}
    for name, out in (("query", G * K * D), ("key", G * D), ("value", G * E)):
        weight = random.normal(0, M**-0.5, (M, out)).astype(dtype)
        tensors.update({f"W_{name}": weight} if layout == "v1" else {f"W_{name}.weight": weight.T})
        if layout == "v2" and random.random() < 0.5:
            tensors[f"W_{name}.bias"] = random.normal(size=out).astype(dtype)
    layer = {"layout": layout, "heads": G * K, "tensors": tensors}
    choices: list[dict[str, Any]] = [{}, {"causal": True}, {"dropout": 0.4, "seed": seed}]
    parameters = choices[int(random.integers(3))]
    outputs = OUTPUTS[int(random.integers(len(OUTPUTS)))]
    one = bool(random.integers(2))
    jobs = []
    for _ in range(int(random.integers(2, 5))):
        B = int(random.integers(1, 5))
        lengths = {"x": L} if one else {"query": L, "key": S, "value": S}
        sent = {n: random.normal(size=(B, size, M)).astype(dtype) for n, size in lengths.items()}
        jobs.append(job_of(sent, outputs, layer, **parameters))
    return [jobs[0], *(with_layer(job, jobs[0]) for job in jobs[1:])]


def with_layer(job: Job, other: Job) -> Job:
    """The job with the very layer of the other, as a saved one would be."""
    return replace(job, inputs=job.inputs._replace(layer=other.inputs.layer))


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_same_bits_with_layers(held: Held, first: int) -> None:
    """Projections do not depend on who is beside: a hundred and fifty layers of many widths."""
    for seed in range(first, first + 25):
        jobs = layer_group(seed)
        alone, grouped = held.alone(jobs), held.together(jobs)
        for one, answer in zip(alone, grouped, strict=True):
            assert answer.timing["batch_size"] == len(jobs)
            assert bits(answer) == bits(one), f"seed {seed}"


def moved(raw: RawTensor, offset: int, writeable: bool = True) -> RawTensor:
    """The same tensor in a buffer that begins `offset` bytes past a 64-byte boundary."""
    room = np.empty(raw.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + offset
    there = room[start : start + raw.nbytes]
    there[:] = np.frombuffer(raw.data, np.uint8)
    there.flags.writeable = writeable
    return RawTensor(raw.dtype, raw.shape, there.data)


def at(job: Job, offsets: Mapping[str, int], writeable: bool = True) -> Job:
    """The job with each of its tensors so many bytes past an aligned address."""
    tensors = {n: moved(t, offsets[n], writeable) for n, t in job.inputs.tensors.items()}
    return replace(job, inputs=job.inputs._replace(tensors=tensors))


@settings(max_examples=80, deadline=None)
@given(requests(), st.lists(st.integers(0, 63), min_size=5, max_size=5), st.booleans())
def test_where_a_buffer_begins_does_not_matter(
    held: Held, request: Request, offsets: list[int], writeable: bool
) -> None:
    """Bodies put tensors anywhere; the answer's bits are those of aligned ones."""
    job = job_from(request, ("output", "weights"))
    names = list(job.inputs.tensors)
    shifts = dict(zip(names, offsets, strict=False))
    aligned = at(job, dict.fromkeys(names, 0))
    anywhere = at(job, shifts, writeable)
    first, second = held.alone([aligned, anywhere])
    assert bits(first) == bits(second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("H", "N", "D"), [(3, 33, 65), (1, 64, 64), (2, 16, 16), (33, 65, 8), (1, 200, 16)]
)
def test_where_a_larger_buffer_begins_does_not_matter(
    held: Held, dtype: torch.dtype, H: int, N: int, D: int
) -> None:
    """Shapes whose bits do change with it where the engine does not see to that."""
    tensors = {n: torch.randn(1, H, N, D).to(dtype) for n in ("query", "key", "value")}
    for outputs in (("output",), ("output", "weights")):
        job = job_of(tensors, outputs)
        jobs = [at(job, dict.fromkeys(tensors, offset)) for offset in (0, 4, 8, 16, 24, 32, 48)]
        first, *others = held.alone(jobs)
        assert all(bits(other) == bits(first) for other in others)


@settings(max_examples=50, deadline=None)
@given(requests())
def test_inputs_are_never_written_to(held: Held, request: Request) -> None:
    """They are views of the request's own buffers."""
    job = job_from(request, ("output", "weights", "scores"))
    ready = at(job, dict.fromkeys(job.inputs.tensors, 0))
    before = {n: bytes(t.data) for n, t in ready.inputs.tensors.items()}
    held.alone([ready])
    assert {n: bytes(t.data) for n, t in ready.inputs.tensors.items()} == before


# ---------------------------------------------------------------- stacked, as on a GPU


@settings(max_examples=150, deadline=None)
@given(groups())
def test_a_stack_answers_as_each_alone(
    stacked: Held, group: tuple[list[Request], tuple[str, ...]]
) -> None:
    """Within what rounding allows, masks, key lengths, dropout's places and all."""
    members, _ = group
    jobs = [job_from(request, ("output", "weights", "scores")) for request in members]
    found, alone = stacked.together(jobs), stacked.alone(jobs)
    for request, answer, one in zip(members, found, alone, strict=True):
        assert answer.timing["batch_size"] == len(jobs)
        query, key, value, mask, lengths = request.tensors()
        truth = softmax.reference(query, key, value, mask, lengths, **request.parameters)
        bound = bounds(query, key, value, mask, request.parameters, truth)
        for name, raw in answer.outputs.items():
            assert raw.dtype == one.outputs[name].dtype
            assert_within(tensor_of(raw), getattr(truth, name), getattr(bound, name))
        if request.parameters.get("dropout"):
            masks = [tensor_of(a.outputs["weights"]) == 0 for a in (answer, one)]
            assert torch.equal(*masks)


@pytest.mark.parametrize("seed", range(40))
def test_a_stack_over_a_layer_answers_as_each_alone(stacked: Held, seed: int) -> None:
    jobs = layer_group(seed)
    found, alone = stacked.together(jobs), stacked.alone(jobs)
    # two orders of summation over M, D and S, all sizes of order one: half of the digits
    close = {"float64": 2.0**-26, "float32": 2.0**-12, "float16": 2.0**-5}[jobs[0].inputs.dtype]
    for answer, one in zip(found, alone, strict=True):
        assert answer.timing["batch_size"] == len(jobs)
        assert answer.outputs.keys() == one.outputs.keys()
        for name in answer.outputs:
            left, right = tensor_of(answer.outputs[name]), tensor_of(one.outputs[name])
            torch.testing.assert_close(left, right, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e30), (torch.float64, 1e200), (torch.bfloat16, 1e30)],
    ids=str,
)
def test_a_strangers_huge_numbers_leave_a_stack_alone(
    stacked: Held, dtype: torch.dtype, size: float
) -> None:
    """Which path a request takes depends on its own numbers: else its bits would on others'."""
    names = ("query", "key", "value")
    ordinary, huge = (
        job_of({n: (torch.randn(1, 2, 33, 8).double() * x).to(dtype) for n in names})
        for x in (1.0, size)
    )
    for outputs in (("output",), ("output", "weights")):
        first = replace(ordinary, outputs=frozenset(outputs))
        second = replace(huge, outputs=frozenset(outputs))
        (alone,) = stacked.alone([first])
        found, _ = stacked.together([first, second])
        assert found.timing["batch_size"] == 2
        assert bits(found) == bits(alone)


def test_a_strangers_overflowing_projection_leaves_a_stack_alone(stacked: Held) -> None:
    """The same where it is a layer that makes the numbers large: easily so in float16."""
    weight = torch.randn(64, 16).half()
    names = ("query", "key", "value")
    layer = {"layout": "v1", "heads": 2, "tensors": {f"W_{n}": weight for n in names}}
    first, second = (
        job_of({"x": torch.randn(1, 9, 64).half() * size}, ("output", "weights"), layer)
        for size in (1.0, 2e4)
    )
    second = with_layer(second, first)
    (alone,) = stacked.alone([first])
    found, _ = stacked.together([first, second])
    assert found.timing["batch_size"] == 2
    assert bits(found) == bits(alone)


# ---------------------------------------------------------------- which jobs run together


def test_only_equal_keys_share_a_batch() -> None:
    """Parameters, lengths, dtypes and outputs part; batch sizes, numbers and ranks do not."""
    flat = {n: torch.randn(4, 8) for n in ("query", "key", "value")}
    jobs = [
        plain(1), plain(2, batch=3),
        plain(3, length=5), plain(4, causal=True), plain(5, outputs=("output",)),
        plain(6, dropout=0.5, seed=1), plain(7, dropout=0.5, seed=2),
        job_of(flat), job_of({n: t[None, None] for n, t in flat.items()}),
        job_of({n: t.double() for n, t in flat.items()}),
    ]  # fmt: skip

    async def test(engine: Engine) -> list[int]:
        return [a.timing["batch_size"] for a in await together(engine, jobs)]

    assert with_engine(test) == [2, 2, 1, 1, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_batch": 2}, [2, 2, 2, 2, 1]),
        ({"max_batch": 1}, [1, 1, 1, 1, 1]),
        ({"max_batch": 0}, [1, 1, 1, 1, 1]),  # a CPU's default
    ],
)
def test_max_batch(options: dict[str, int], sizes: list[int]) -> None:
    async def test(engine: Engine) -> list[int]:
        answers = await together(engine, [plain(seed) for seed in range(5)])
        return [a.timing["batch_size"] for a in answers]

    assert with_engine(test, **options) == sizes


def test_the_oldest_group_runs_first() -> None:
    """And takes the younger ones of its kind along, past those who came in between."""
    jobs = [plain(0), plain(1, length=5), plain(2), plain(3, length=6), plain(4, length=5)]

    async def test(engine: Engine) -> list[int]:
        done: list[int] = []
        with engine.hold():
            futures = [engine.submit(job) for job in jobs]
            for i, future in enumerate(futures):
                future.add_done_callback(lambda _, i=i: done.append(i))  # type: ignore[misc]
        await asyncio.gather(*futures)
        return done

    assert with_engine(test) == [0, 2, 1, 4, 3]


def test_a_batch_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in and out; a job that is past it by itself still runs, alone."""
    small, large = plain(0), plain(0, batch=8)
    one = small.bytes_in + small.bytes_out
    monkeypatch.setattr(qkv.engine, "_BATCH_BYTES", 2 * one)
    jobs = [plain(1), plain(2), plain(3), large, plain(4)]
    assert {job.key for job in jobs} == {small.key}

    async def test(engine: Engine) -> list[int]:
        return [a.timing["batch_size"] for a in await together(engine, jobs)]

    assert with_engine(test) == [2, 2, 1, 1, 1]


def test_callers_that_have_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while they wait, at the front, inside a group, and all of one: none runs."""
    ran: list[Job] = []

    def recorded(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        ran.extend(jobs)
        return run(jobs, *how)

    monkeypatch.setattr(qkv.engine, "run", recorded)
    jobs = [plain(seed, length=4 + seed % 2) for seed in range(6)] + [plain(6, length=9)]
    gone = {0, 3, 6}

    async def test(engine: Engine) -> None:
        with engine.hold():
            futures = [engine.submit(job) for job in jobs]
            for i in gone:
                futures[i].cancel()
        answers = await asyncio.gather(*futures, return_exceptions=True)
        assert {i for i, a in enumerate(answers) if isinstance(a, asyncio.CancelledError)} == gone
        sizes = [a.timing["batch_size"] for a in answers if isinstance(a, Answer)]
        assert sizes == [2, 2, 2, 2]
        with engine.hold():
            futures = [engine.submit(plain(seed)) for seed in range(3)]
            for future in futures:
                future.cancel()
        await engine.submit(plain(9))  # nothing of them is left in the way

    with_engine(test)
    assert [jobs.index(job) for job in ran[:-1]] == [1, 5, 2, 4]


def test_a_caller_may_leave_while_its_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(jobs: Sequence[Job], *how: Any) -> list[Ran]:
        entered.set()
        assert leave.wait(60)
        return run(jobs, *how)

    monkeypatch.setattr(qkv.engine, "run", slow)

    async def test(engine: Engine) -> None:
        with engine.hold():
            leaving, staying = engine.submit(plain(1)), engine.submit(plain(2))
        assert await asyncio.to_thread(entered.wait, 60)
        leaving.cancel()
        leave.set()
        assert (await staying).timing["batch_size"] == 2
        assert leaving.cancelled()
        await engine.submit(plain(3))

    with_engine(test)


# ---------------------------------------------------------------- faults


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
        monkeypatch.setattr(qkv.engine, "run", failing)
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
            patch.setattr(qkv.engine, "run", failing)
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
            patch.setattr(qkv.engine, "run", failing)
            with pytest.raises(Internal, match="the computation failed"):
                engine.run_now(job)
            assert engine.run_standing(standing) is None
        assert engine.run_now(job) is not None

    with_engine(test)


def test_the_thread_survives_what_no_batch_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a fault of the engine's own bookkeeping is an answer to those who wait."""

    async def test(engine: Engine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(qkv.engine, "run", lambda *_: [])
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

    monkeypatch.setattr(qkv.engine, "run", greedy)

    async def test(engine: Engine) -> None:
        with pytest.raises(expected, match="memory"):
            await engine.submit(plain(1))

    with_engine(test)


def test_only_so_many_bytes_may_wait() -> None:
    """More is refused for now; what leaves the queue, run or cancelled, makes room again."""
    job = plain(1)
    size = job.bytes_in + job.bytes_out

    async def test(engine: Engine) -> None:
        for _ in range(3):
            with engine.hold():
                futures = [engine.submit(plain(seed)) for seed in range(3)]
                with pytest.raises(NotNow) as caught:
                    engine.submit(plain(3))
                assert caught.value.status == 503
                assert int(caught.value.headers()["Retry-After"]) >= 1
                futures[1].cancel()
                await asyncio.sleep(0)
                futures.append(engine.submit(plain(4)))  # in the place of the one that left
                with pytest.raises(NotNow):
                    engine.submit(plain(5))
            answers = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(a) for a in answers].count(Answer) == 3
        assert engine._queue.waits == Load()

    with_engine(test, most=ANY_LOAD._replace(bytes=3 * size))


def test_one_that_is_larger_than_the_queue_may_wait_alone() -> None:
    async def test(engine: Engine) -> None:
        with engine.hold():
            future = engine.submit(plain(1))
            with pytest.raises(NotNow):
                engine.submit(plain(2))
        await future

    with_engine(test, most=ANY_LOAD._replace(bytes=1))


def test_stopping_answers_those_who_wait() -> None:
    async def test(engine: Engine) -> None:
        with engine.hold():
            futures = [engine.submit(plain(seed, length=3 + seed % 3)) for seed in range(6)]
            stopping = asyncio.ensure_future(engine.stop())
            await asyncio.sleep(0.02)
            assert (engine.ready, engine.alive) == (False, True)
            with pytest.raises(NotNow, match="stopping"):
                engine.submit(plain(9))
        answers = await asyncio.gather(*futures)
        assert len(answers) == 6
        await stopping
        assert (engine.ready, engine.alive) == (False, False)
        with pytest.raises(NotNow):
            engine.submit(plain(9))

    with_engine(test)


def test_holds_nest() -> None:
    async def test(engine: Engine) -> None:
        with engine.hold():
            with engine.hold():
                future = engine.submit(plain(1))
            await asyncio.sleep(0.02)
            assert not future.done()
        await future

    with_engine(test)


def test_nothing_of_a_job_is_kept() -> None:
    """Neither its tensors nor its answer: an idle engine holds no memory of the last one."""

    async def test(engine: Engine) -> None:
        job = plain(1)
        kept = weakref.ref(job)
        answer = weakref.ref((await engine.submit(job)).outputs["output"].data.obj)
        del job
        deadline = time.monotonic() + 10
        while (kept() is not None or answer() is not None) and time.monotonic() < deadline:
            gc.collect()
            await asyncio.sleep(0.01)
        assert kept() is None
        assert answer() is None

    with_engine(test)


# ---------------------------------------------------------------- timing


def test_timing_is_measured() -> None:
    async def test(engine: Engine) -> None:
        began = time.perf_counter()
        with engine.hold():
            early = engine.submit(plain(1, outputs=("output",)))
            await asyncio.sleep(0.05)
            late = engine.submit(plain(2, length=5))
        first, second = (await early).timing, (await late).timing
        most = (time.perf_counter() - began) * 1e3
        assert first["queue_ms"] >= 50
        assert 0 < second["queue_ms"] <= most - 50  # it came later
        for timing in (first, second):
            assert timing["compute_ms"] > 0
            assert timing["transfer_ms"] > 0
            assert sum(timing[f"{s}_ms"] for s in ("queue", "compute", "transfer")) <= most
        assert (first["device"], first["backend"], second["backend"]) == ("cpu", "sdpa", "explicit")
        idle = [(await engine.submit(plain(3))).timing for _ in range(5)]
        assert min(timing["queue_ms"] for timing in idle) < first["queue_ms"]
        assert {timing["batch_size"] for timing in idle} == {1}

    with_engine(test)


def test_compute_grows_with_the_work() -> None:
    """Two orders of magnitude more of it take longer, whatever else this machine does."""

    async def test(engine: Engine) -> None:
        few, many = plain(1, length=8), plain(2, length=2048)
        times = {id(j): [] for j in (few, many)}  # type: dict[int, list[float]]
        for _ in range(3):
            for job in (few, many):
                times[id(job)].append((await engine.submit(job)).timing["compute_ms"])
        assert min(times[id(many)]) > min(times[id(few)])

    with_engine(test)


def test_flops_and_bytes_are_counted() -> None:
    """2 B H L S (D + E), and the tensors that came and went; a layer's projections count."""
    query, key = torch.randn(3, 4, 5, 6), torch.randn(3, 2, 7, 6)
    value = torch.randn(3, 2, 7, 8)
    job = job_of({"query": query, "key": key, "value": value})
    weight = torch.randn(6, 8)
    layer = {
        "layout": "v1",
        "heads": 2,
        "tensors": {f"W_{n}": weight for n in ("query", "key", "value")},
    }
    layered = job_of({"x": torch.randn(3, 5, 6)}, ("output",), layer)

    async def test(engine: Engine) -> None:
        timing = (await engine.submit(job)).timing
        assert timing["flops"] == 2 * 3 * 4 * 5 * 7 * (6 + 8)
        sent = query.numel() + key.numel() + value.numel()
        assert timing["bytes"] == 4 * (sent + 3 * 4 * 5 * 8 + 3 * 4 * 5 * 7)
        timing = (await engine.submit(layered)).timing
        assert timing["flops"] == 3 * 2 * 3 * 5 * 6 * 8 + 2 * 3 * 2 * 5 * 5 * (4 + 4)
        assert timing["bytes"] == 4 * (3 * 5 * 6 + 3 * 6 * 8 + 3 * 5 * 8)

    with_engine(test)
