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

from qkv.errors import Internal, NotNow, QkvError
from qkv.job import Job
from qkv.run import Ran, run
from qkv.tensors import RawTensor

__all__ = ["Answer", "Engine", "pick_device"]

_log = logging.getLogger("qkv.engine")

_BATCH_BYTES: Final = 1 << 30  # tensors in and out that run together, beyond the first job
_GPU_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs by name, and the timing, all of it measured but `flops` and `bytes`."""

    outputs: dict[str, RawTensor]
    timing: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job
    future: asyncio.Future[Answer]
    since: float = field(default_factory=time.perf_counter)

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
        on_busy: told when a batch starts and when it is done, from the device thread.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_batch: int = 0,
        threads: int = 1,
        max_queue_bytes: int = 4 << 30,
        stack: bool | None = None,
        on_busy: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.device = device
        self._max_batch = max_batch or (1 if device.type == "cpu" else _GPU_BATCH)
        self._threads = threads
        self._max_queue_bytes = max_queue_bytes
        self._stack = device.type != "cpu" if stack is None else stack
        self._on_busy = on_busy
        self._groups: dict[Hashable, deque[_Waiting]] = defaultdict(deque)
        self._order: OrderedDict[_Waiting, None] = OrderedDict()
        self._bytes = 0
        self._holds = 0
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

    def submit(self, job: Job) -> asyncio.Future[Answer]:
        """Queues a job; its answer is the future's result. Cancelling the future drops it.

        Raises:
            NotNow: too much waits already, or the engine is stopping.
        """
        assert self._loop is not None
        waiting = _Waiting(job, self._loop.create_future())
        with self._changed:
            if not self.ready:
                raise NotNow("the service is stopping", retry_after=5)
            if self._bytes and self._bytes + waiting.bytes > self._max_queue_bytes:
                raise NotNow(
                    f"{self._bytes} bytes of tensors wait already; at most "
                    f"{self._max_queue_bytes} may"
                )
            self._groups[job.key].append(waiting)
            self._bytes += waiting.bytes
            self._order[waiting] = None
            self._changed.notify()
        waiting.future.add_done_callback(lambda future: self._left(waiting, future))
        return waiting.future

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
        with self._changed:
            if future.cancelled() and waiting in self._order:
                self._drop(waiting)

    def _drop(self, waiting: _Waiting) -> None:
        group = self._groups[waiting.job.key]
        group.remove(waiting)
        if not group:
            del self._groups[waiting.job.key]
        self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        del self._order[waiting]
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
                if self._order and not self._holds:
                    oldest = next(iter(self._order))
                    if oldest.future.cancelled():
                        self._drop(oldest)
                    else:
                        return self._group(oldest)
                    continue
                if self._closing and not self._order:
                    return []
                self._changed.wait()

    def _group(self, oldest: _Waiting) -> list[_Waiting]:
        """The jobs that run with the oldest; those whose callers leave meanwhile run for nobody."""
        key = oldest.job.key
        group, total = self._groups[key], 0
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
            del self._groups[key]
        return batch

    def _run(self, batch: list[_Waiting]) -> list[tuple[_Waiting, Answer | QkvError]]:
        """Runs a batch; a failing one is halved until the culprit fails alone."""
        try:
            ran = run([w.job for w in batch], self.device, self._stack, self._threads)
        except Exception as error:
            cause = error
        else:
            return [(w, self._answer(w, r)) for w, r in zip(batch, ran, strict=True)]
        if len(batch) > 1:
            middle = len(batch) // 2
            return self._run(batch[:middle]) + self._run(batch[middle:])
        _log.error("a job of %s failed", batch[0].job.variant.name, exc_info=cause)
        return [(batch[0], cause if isinstance(cause, QkvError) else _fault(cause))]

    def _answer(self, waiting: _Waiting, ran: Ran) -> Answer:
        job = waiting.job
        return Answer(
            ran.outputs,
            {
                "queue_ms": (ran.started - waiting.since) * 1e3,
                "transfer_ms": ran.transfer_s * 1e3,
                "compute_ms": ran.compute_s * 1e3,
                "batch_size": ran.batch_size,
                "device": str(self.device),
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
