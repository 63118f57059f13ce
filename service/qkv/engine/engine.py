"""The queue and the one thread that owns the device: pull, not timers.

While the device works, jobs pile up; when it frees, the oldest group of jobs with equal keys runs,
up to a budget. At low load nobody waits, at high load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch

from qkv.engine.accounting import Alone, Ledger
from qkv.engine.admission import Door
from qkv.engine.device_errors import Budget, is_out_of_memory, is_sticky, make_room, told
from qkv.engine.executor import Standing, run
from qkv.engine.work_queue import DEFAULT_PRIORITY, PRIORITIES, Answer, Load, Queue, Waiting
from qkv.errors import Internal, NotNow, QkvError, TooLate
from qkv.jobs.job import Job
from qkv.telemetry.metrics import Usage

__all__ = ["ANY_LOAD", "GPU_BATCH", "Answer", "Engine", "pick_device"]

_log = logging.getLogger("qkv.engine")

_BATCH_BYTES: Final = 1 << 30  # tensors in and out that run together, beyond the first job
GPU_BATCH: Final = 64
"""Most requests that run together on a GPU, unless a setting says otherwise."""
ANY_LOAD: Final = Load(1024, 4 << 30, 1 << 50)
"""What may wait, unless settings say otherwise."""

_AFTER_FAULT_S: Final = 5  # until another process is there, and some more


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
        most: what may wait.
        stack: whether a group runs as one call; None: on a GPU only (see `run.run`).
        spare: says how many CPU threads nobody else wants now.
        on_busy: told when a batch starts and when it is done, from the device thread.

    Attributes:
        ledger: counts what becomes of jobs, and makes their answers.
        door: lets requests in whose bodies come in.
        broken: set once nothing will run in this process any more.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_batch: int = 0,
        threads: int = 1,
        most: Load = ANY_LOAD,
        stack: bool | None = None,
        spare: Callable[[], int] = lambda: 1,
        on_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.device, self.ledger = device, Ledger(str(device))
        self._max_batch = max_batch or (1 if device.type == "cpu" else GPU_BATCH)
        self._threads = threads
        self._stack = device.type != "cpu" if stack is None else stack
        self._spare = spare
        self._on_busy = on_busy
        self._queue = Queue(most)
        self.door = Door(most, lambda: self._queue.waits, self._queue.rate.retry_after)
        self.broken = asyncio.Event()
        self._budget = Budget(_BATCH_BYTES)
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
        return self.alive and not self._closing and not self.broken.is_set()

    def usage(self) -> Usage:
        """What waits, and what this process has of the device's memory."""
        waits = self._queue.waits
        if self.device.type != "cuda" or not torch.cuda.is_initialized():
            return Usage(waits.requests, waits.bytes)
        return Usage(
            waits.requests,
            waits.bytes,
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
            TooLate: its time is up already.
        """
        assert self._loop is not None
        priority = priority if priority in PRIORITIES else DEFAULT_PRIORITY
        now = time.perf_counter()
        since = now if since is None else since
        until = None if wait_s is None else since + wait_s
        waiting = Waiting(job, self._loop.create_future(), priority, since, until)
        if waiting.is_late:
            raise self._too_late(waiting)
        with self._changed:
            if not self.ready:
                raise self._unready()
            self._queue.put(waiting)
            self._changed.notify()
        waiting.future.add_done_callback(lambda future: self._left(waiting, future))
        if until is not None:
            timer = self._loop.call_later(until - now, self._expire, waiting)
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
            raise self._unready()
        assert self._loop is not None
        now = Waiting(job, self._loop.create_future())
        self._on_busy(True)
        try:
            ((_, result),) = self._run([now])
        finally:
            self._on_busy(False)
        if isinstance(result, QkvError):
            raise result
        return result

    def run_standing(self, standing: Standing) -> Alone | None:
        """Runs a job that stands ready. None where others run or wait, the engine is stopping, or
        it fails: then it should go the long way, which says why."""
        if not self._is_free() or self._closing or self.broken.is_set():
            return None
        try:
            ran = standing.run()
            return Alone(self.ledger, standing.job, ran, time.perf_counter() - ran.started)
        except BaseException:
            return None

    def _is_free(self) -> bool:
        """Whether nothing runs or waits; whatever submits jobs does so on the loop that asks, so
        that none comes before it goes on. What is taken runs before it waits no more: without a
        lock, in this order."""
        return not (self._queue.waits.requests or self._running or self._holds)

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

    def _left(self, waiting: Waiting, future: asyncio.Future[Answer]) -> None:
        """Frees the place of a caller that leaves before its turn."""
        if future.cancelled():
            self._drop(waiting)

    def _expire(self, waiting: Waiting) -> None:
        """Tells a caller whose turn has not come in time; one whose job runs gets its answer."""
        if self._drop(waiting) and not waiting.future.done():  # its caller may just have left
            waiting.future.set_exception(self._too_late(waiting))

    def _too_late(self, waiting: Waiting) -> TooLate:
        self.ledger.failed(waiting)
        assert waiting.until is not None
        wait_ms = (waiting.until - waiting.since) * 1e3
        return TooLate(f"the device was not free within {wait_ms:g} ms")

    def _unready(self) -> NotNow:
        if self.broken.is_set():
            return NotNow("the device has failed", retry_after=_AFTER_FAULT_S)
        return NotNow("the service is stopping", retry_after=5)

    def _drop(self, waiting: Waiting) -> bool:
        """Takes a job out of the queue; false where its turn has come already."""
        with self._changed:
            return self._queue.drop(waiting)

    def _work(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except BaseException:  # nothing may end this loop; what is ours to fix is logged
                _log.exception("the engine failed")
                self._break(Internal("the engine failed"))

    def _turn(self) -> bool:
        """Runs the next batch; false where there is none, and none will be."""
        if not (batch := self._take()):
            return False
        try:
            self._resolve(self._run_in_time(batch))
        except BaseException:
            _log.exception("the engine failed")
            self._resolve([(w, Internal("the engine failed")) for w in batch])
        return True

    def _run_in_time(self, batch: list[Waiting]) -> list[tuple[Waiting, Answer | QkvError]]:
        """Runs those of a batch whose time is not up; a busy loop may not have said so yet."""
        late = [w for w in batch if w.is_late]
        rest = [w for w in batch if w not in late] if late else batch
        results: list[tuple[Waiting, Answer | QkvError]] = [(w, self._too_late(w)) for w in late]
        if rest:
            started = time.perf_counter()
            self._on_busy(True)
            try:
                results += self._run(rest)
            finally:
                self._on_busy(False)
            self._queue.rate.add(Load.of(rest), time.perf_counter() - started)
        return results

    def _take(self) -> list[Waiting]:
        """The oldest group, up to the budget, without those whose caller has gone; empty when
        the engine stops and nothing waits."""
        with self._changed:
            while True:
                oldest = self._queue.oldest()
                if oldest is not None and not self._holds:
                    self._running = True
                    return self._queue.take(oldest, self._max_batch, self._budget.bytes)
                self._running = False
                if self._closing and oldest is None:
                    return []
                self._changed.wait()

    def _break(self, told: QkvError) -> None:
        """Gives up: whoever waits is told, and whoever looks after this process is to end it."""
        with self._changed:
            lost = self._queue.clear()
        self._resolve([(waiting, told) for waiting in lost])
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: it ends already
            self._loop.call_soon_threadsafe(self.broken.set)

    def _run(self, batch: list[Waiting]) -> list[tuple[Waiting, Answer | QkvError]]:
        """Runs a batch; a failing one is halved until the culprit fails alone."""
        size = sum(w.bytes for w in batch)
        try:
            jobs = [w.job for w in batch]
            spare = 1 if self._queue.waits.bytes or jobs[0].is_small else self._spare()
            ran = run(jobs, self.device, self._stack, self._threads, spare)
        except BaseException as error:  # a variant's SystemExit ends neither thread nor loop
            cause = error
        else:
            self._budget.recover(size)
            since = [w.since for w in batch]
            self.ledger.ran(jobs[0], since, ran)
            made = map(self.ledger.answer, jobs, since, ran)
            return list(zip(batch, made, strict=True))
        if is_sticky(cause, self.device):
            _log.critical("the device has failed, and this process with it", exc_info=cause)
            failed = NotNow("the device has failed", retry_after=_AFTER_FAULT_S)
            self._break(failed)
            return [(w, failed) for w in batch]
        if is_out_of_memory(cause):
            self._budget.lower(size)
            make_room(cause, self.device)
        if len(batch) > 1:
            middle = len(batch) // 2
            return self._run(batch[:middle]) + self._run(batch[middle:])
        _log.error("a job of %s failed", batch[0].job.variant.name, exc_info=cause)
        self.ledger.failed(batch[0])
        return [(batch[0], told(cause, self.device))]

    def _resolve(self, results: list[tuple[Waiting, Answer | QkvError]]) -> None:
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
