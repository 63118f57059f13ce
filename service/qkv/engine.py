"""The queue and the one thread that owns the device: pull, not timers.

While the device works, jobs pile up; when it frees, the oldest group of jobs with equal keys runs,
up to a budget. At low load nobody waits, at high load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from qkv.errors import Internal, NotNow, QkvError, TooLate
from qkv.gradient import GradientJob
from qkv.job import Job
from qkv.metrics import Load
from qkv.models import Recorder
from qkv.run import Ran, Standing, run
from qkv.tensors import RawTensor

__all__ = ["GPU_BATCH", "Answer", "Engine", "pick_device"]

_log = logging.getLogger("qkv.engine")

_BATCH_BYTES: Final = 1 << 30  # tensors in and out that run together, beyond the first job
GPU_BATCH: Final = 64
"""Most requests that run together on a GPU, unless a setting says otherwise."""

_PRIORITIES: Final = (1, 2, 3)  # first, as everybody, last
_DEFAULT_PRIORITY: Final = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs by name, and the timing, all of it measured but `flops` and `bytes`."""

    outputs: dict[str, RawTensor]
    timing: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job
    future: asyncio.Future[Answer]
    priority: int
    since: float = field(default_factory=time.perf_counter)

    @property
    def key(self) -> Hashable:
        return self.priority, self.job.key

    @property
    def bytes(self) -> int:
        return self.job.bytes_in + self.job.bytes_out


def _fault(error: Exception) -> QkvError:
    """What a caller is told of a failure; torch on a CPU says out of memory in words only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in str(error):
        return NotNow("out of memory on the device")
    return Internal("the computation failed")


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a CUDA device where there is one.

    Raises:
        ValueError: it is not there.
    """
    there = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("QKV_DEVICE is cuda, and torch finds no CUDA device")
    return torch.device("cuda" if there else "cpu")


class Engine:
    """Takes jobs from one event loop and runs them on one device, in one thread.

    Args:
        device: where they run.
        max_batch: most jobs that run together; 0: 1 on a CPU, 64 on a GPU.
        threads: CPU threads of one call.
        max_queue_bytes: tensor bytes, in and out, that may wait.
        stack: whether a group runs as one call; None: on a GPU only (see `run.run`).
        spare: says how many CPU threads nobody else wants now.
        on_busy: told when a batch starts and when it is done, from the device thread.

    Attributes:
        recorder: counts what becomes of jobs, once there is one.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_batch: int = 0,
        threads: int = 1,
        max_queue_bytes: int = 4 << 30,
        stack: bool | None = None,
        spare: Callable[[], int] = lambda: 1,
        on_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.device, self._device_name = device, str(device)
        self._max_batch = max_batch or (1 if device.type == "cpu" else GPU_BATCH)
        self._threads = threads
        self._max_queue_bytes = max_queue_bytes
        self._stack = device.type != "cpu" if stack is None else stack
        self._spare = spare
        self._on_busy = on_busy
        self.recorder: Recorder | None = None
        self._groups: dict[Hashable, deque[_Waiting]] = defaultdict(deque)
        self._orders: dict[int, OrderedDict[_Waiting, None]] = {
            priority: OrderedDict() for priority in _PRIORITIES
        }
        self._bytes = 0
        self._holds = 0
        self._running = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="qkv-device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the device thread; to be called on the loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Takes no more jobs, answers those that wait, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the device thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether jobs are taken."""
        return self.alive and not self._closing

    def load(self) -> Load:
        """What waits, and what this process has of the device's memory."""
        waiting = sum(map(len, self._orders.values()))
        if self.device.type != "cuda" or not torch.cuda.is_initialized():
            return Load(waiting, self._bytes)
        return Load(
            waiting,
            self._bytes,
            torch.cuda.memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            torch.cuda.get_device_properties(self.device).total_memory,
        )

    def submit(
        self,
        job: Job,
        *,
        priority: int = 0,
        wait_s: float | None = None,
        since: float | None = None,
    ) -> asyncio.Future[Answer]:
        """Queues a job; its answer is the future's result. Cancelling the future drops it.

        Args:
            job: what to run.
            priority: 1 goes before all others, 3 after; anything else is like everybody, 2.
            wait_s: seconds that it may wait for the device; then the future fails with TooLate.
            since: from when on it waits, by `time.perf_counter`; None: now.

        Raises:
            NotNow: too much waits already, or the engine is stopping.
        """
        assert self._loop is not None
        priority = priority if priority in _PRIORITIES else _DEFAULT_PRIORITY
        now = time.perf_counter()
        since = now if since is None else since
        waiting = _Waiting(job, self._loop.create_future(), priority, since)
        with self._changed:
            if not self.ready:
                raise NotNow("the service is stopping", retry_after=5)
            if self._bytes and self._bytes + waiting.bytes > self._max_queue_bytes:
                raise NotNow(
                    f"{self._bytes} bytes of tensors wait already; at most "
                    f"{self._max_queue_bytes} may"
                )
            self._groups[waiting.key].append(waiting)
            self._bytes += waiting.bytes
            self._orders[priority][waiting] = None
            self._changed.notify()
        waiting.future.add_done_callback(lambda future: self._left(waiting, future))
        if wait_s is not None:
            left_s = wait_s - (now - since)
            timer = self._loop.call_later(left_s, self._expire, waiting, wait_s)
            waiting.future.add_done_callback(lambda _: timer.cancel())
        return waiting.future

    def runs_now(self, job: Job) -> bool:
        """Whether such a job runs at once where nothing else runs or waits: on a CPU the way to the
        device's thread and back takes longer than a small one."""
        return job.is_small and not self._stack and self.device.type == "cpu"

    def run_now(self, job: Job) -> Answer | None:
        """Runs a small job at once, on the loop itself. None where it is no such job, or others run
        or wait.

        Raises:
            NotNow: the engine is stopping.
            QkvError: it failed.
        """
        if not self.runs_now(job) or not self._is_free():
            return None
        if not self.ready:
            raise NotNow("the service is stopping", retry_after=5)
        assert self._loop is not None
        now = _Waiting(job, self._loop.create_future(), _DEFAULT_PRIORITY)
        self._on_busy(True)
        try:
            ((_, result),) = self._run([now])
        finally:
            self._on_busy(False)
        if isinstance(result, QkvError):
            raise result
        return result

    def run_standing(self, standing: Standing) -> Answer | None:
        """Runs a job that stands ready. None where others run or wait, the engine is stopping, or
        it fails: then it should go the long way, which says why."""
        if not self._is_free() or not self.ready:
            return None
        since = time.perf_counter()
        try:
            ran = standing.run()
        except Exception:
            return None
        self._record([(standing.job, since)], [ran])
        return self._answer(standing.job, since, ran)

    def _is_free(self) -> bool:
        """Whether nothing runs or waits; whatever submits jobs does so on the loop that asks, so
        that none comes before it goes on."""
        with self._changed:
            return not (self._running or self._holds or self._groups)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps the device from taking jobs meanwhile, so that a test can be sure of a batch."""
        with self._changed:
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify()

    def _left(self, waiting: _Waiting, future: asyncio.Future[Answer]) -> None:
        """Frees the place of a caller that leaves before its turn."""
        if future.cancelled():
            self._drop(waiting)

    def _expire(self, waiting: _Waiting, wait_s: float) -> None:
        """Tells a caller whose turn has not come in time; one whose job runs gets its answer."""
        if self._drop(waiting) and not waiting.future.done():  # its caller may just have left
            self._record_failure(waiting)
            waiting.future.set_exception(
                TooLate(f"the device was not free within {wait_s * 1e3:g} ms")
            )

    def _drop(self, waiting: _Waiting) -> bool:
        """Takes a job out of the queue; false where its turn has come already."""
        with self._changed:
            if waiting not in self._orders[waiting.priority]:
                return False
            group = self._groups[waiting.key]
            group.remove(waiting)
            if not group:
                del self._groups[waiting.key]
            self._forget(waiting)
            return True

    def _forget(self, waiting: _Waiting) -> None:
        del self._orders[waiting.priority][waiting]
        self._bytes -= waiting.bytes

    def _work(self) -> None:
        while batch := self._take():
            try:
                self._on_busy(True)
                results = self._run(batch)
                self._on_busy(False)
                self._resolve(results)
            except Exception:  # nothing may end this loop; what is ours to fix is logged
                _log.exception("the engine failed")
                self._resolve([(w, Internal("the engine failed")) for w in batch])
            batch, results = [], []  # no tensor is kept while this thread waits for the next

    def _take(self) -> list[_Waiting]:
        """The oldest group, up to the budget, without those whose caller has gone; empty when
        the engine stops and nothing waits."""
        with self._changed:
            while True:
                oldest = self._oldest()
                self._running = False
                if oldest is not None and not self._holds:
                    if not oldest.future.cancelled():
                        self._running = True
                        return self._group(oldest)
                    self._drop(oldest)
                    continue
                if self._closing and oldest is None:
                    return []
                self._changed.wait()

    def _oldest(self) -> _Waiting | None:
        """Who has waited longest, of those with the first priority there is."""
        return next((next(iter(order)) for order in self._orders.values() if order), None)

    def _group(self, oldest: _Waiting) -> list[_Waiting]:
        """The jobs that run with the oldest; those whose callers leave meanwhile run for nobody."""
        group, total = self._groups[oldest.key], 0
        batch: list[_Waiting] = []
        while group and len(batch) < self._max_batch:
            total += group[0].bytes
            if batch and total > _BATCH_BYTES:
                break
            waiting = group.popleft()
            if waiting is oldest or not waiting.future.cancelled():
                batch.append(waiting)
            self._forget(waiting)
        if not group:
            del self._groups[oldest.key]
        return batch

    def _run(self, batch: list[_Waiting]) -> list[tuple[_Waiting, Answer | QkvError]]:
        """Runs a batch; a failing one is halved until the culprit fails alone."""
        try:
            jobs = [w.job for w in batch]
            spare = 1 if self._bytes or jobs[0].is_small else self._spare()
            ran = run(jobs, self.device, self._stack, self._threads, spare)
        except Exception as error:
            cause = error
        else:
            self._record([(w.job, w.since) for w in batch], ran)
            return [(w, self._answer(w.job, w.since, r)) for w, r in zip(batch, ran, strict=True)]
        if len(batch) > 1:
            middle = len(batch) // 2
            return self._run(batch[:middle]) + self._run(batch[middle:])
        _log.error("a job of %s failed", batch[0].job.variant.name, exc_info=cause)
        self._record_failure(batch[0])
        return [(batch[0], cause if isinstance(cause, QkvError) else _fault(cause))]

    def _record(self, batch: list[tuple[Job, float]], ran: list[Ran]) -> None:
        """Counts jobs that ran together, each with when it came."""
        job = batch[0][0]
        if self.recorder is None or isinstance(job, GradientJob):
            return  # it counts inferences
        name, now = job.variant.name, time.perf_counter()
        load = compute = split = 0.0
        for (_, since), r in zip(batch, ran, strict=True):
            # those that shared a call share its seconds: they count once for the batch
            load += r.load_s / r.stacked
            compute += r.compute_s / r.stacked
            split += r.split_s / r.stacked
            stages = (now - since, r.started - since, r.load_s, r.compute_s, r.split_s)
            self.recorder.answered(name, stages)
        self.recorder.executed(name, len(batch), (load, compute, split))

    def _record_failure(self, waiting: _Waiting) -> None:
        if self.recorder is not None and not isinstance(waiting.job, GradientJob):
            name = waiting.job.variant.name
            self.recorder.failed(name, time.perf_counter() - waiting.since)

    def _answer(self, job: Job, since: float, ran: Ran) -> Answer:
        return Answer(
            ran.outputs,
            {
                "queue_ms": (ran.started - since) * 1e3,
                "transfer_ms": (ran.load_s + ran.split_s) * 1e3,
                "compute_ms": ran.compute_s * 1e3,
                "total_ms": (time.perf_counter() - since) * 1e3,
                "batch_size": ran.batch_size,
                "device": self._device_name,
                "backend": ran.backend,
                "flops": job.flops,
                "bytes": job.bytes_in + job.bytes_out,
            },
        )

    def _resolve(self, results: list[tuple[_Waiting, Answer | QkvError]]) -> None:
        """Hands a batch's results to the loop in one call."""

        def settle() -> None:
            for waiting, result in results:
                if waiting.future.done():  # the caller left meanwhile
                    continue
                if isinstance(result, Answer):
                    waiting.future.set_result(result)
                else:
                    waiting.future.set_exception(result)

        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle)
