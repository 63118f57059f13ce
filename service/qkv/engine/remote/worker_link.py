"""The device process's connection to one worker: receives jobs, runs them, sends their results."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
import orjson

from qkv.engine.device_errors import EngineStopped
from qkv.engine.engine import Engine
from qkv.engine.remote.channel import Channel
from qkv.engine.remote.job_memory import input_bytes, read_job
from qkv.engine.remote.messages import (
    NO_DEADLINE,
    JobRequest,
    MessageType,
    pack_id,
    pack_result,
    pack_results,
    unpack_id,
)
from qkv.engine.remote.pending_job import PendingJob
from qkv.engine.remote.plan_reader import PlanReader
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.engine.result import Result
from qkv.engine.work_queue import QueuedJob
from qkv.errors import Internal, QkvError
from qkv.jobs.job import Job
from qkv.jobs.plan import Plan

__all__ = ["WorkerLink"]

_log = logging.getLogger("qkv.device")

_LARGE_BYTES: Final = 1 << 20  # larger outputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.01


class WorkerLink:
    """The connection to one worker, and its pending jobs.

    A restarted worker takes over the memory region of the previous one. READY is sent once this
    process no longer reads or writes that region for the previous worker.

    Args:
        index: index of the worker.
        engine: runs its jobs.
        shared_memory: holds its tensors.
        plan_reader: reads the plans of all workers.
        on_lost: called when the worker has exited.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        shared_memory: SharedMemory,
        plan_reader: PlanReader,
        on_lost: Callable[[], None],
    ) -> None:
        self._index = index
        self._engine, self._shared_memory, self._plan_reader = engine, shared_memory, plan_reader
        self._on_lost = on_lost
        self._pending: dict[int, PendingJob] = {}
        # packed, by backend and notes
        self._results: dict[tuple[str, tuple[str, ...]], list[bytes]] = defaultdict(list)
        self._cancelled_count = 0  # cancelled jobs whose inputs the device may still read
        self._channel: Channel | None = None
        self._reply_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """True while the worker may send frames."""
        return self._channel is not None and not self._channel.closed.is_set()

    async def open(self, end: socket.socket) -> None:
        """Starts to accept the worker's jobs."""
        if self._channel is not None:  # the loss of the previous worker may not be seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        while self._cancelled_count:
            gc.collect()  # an exception's traceback may be all that still refers to a job
            await asyncio.sleep(_POLL_S)
        await channel.open(end)
        channel.send(MessageType.READY, self._engine.device_name.encode())

    async def close(self) -> None:
        """Sends all results, and waits until the channel is closed."""
        await asyncio.sleep(0)  # for results that the engine has just resolved
        await asyncio.gather(*self._reply_tasks)
        self._flush()
        if self._channel is not None and self.is_connected:
            self._channel.close()
            await self._channel.closed.wait()

    def _on_message(self, kind: MessageType, payload: bytes) -> None:
        """Handles a frame of the worker."""
        if kind == MessageType.RUN:
            self._run_jobs(JobRequest.unpack_all(payload))
        elif kind == MessageType.CANCEL:
            pending = self._pending.get(unpack_id(payload)[0])
            if pending is not None and not pending.done():
                self._cancel(pending)

    def _run_jobs(self, requests: Sequence[JobRequest]) -> None:
        """Runs the jobs of a frame: small ones at once if that is faster, else from the queue."""
        queued_jobs: list[QueuedJob] = []
        for request in requests:
            try:
                plan = self._plan_reader.read(request.plan)
                pending = PendingJob(self, request, plan, self._view_inputs(request, plan))
                job = read_job(plan, pending.inputs)
                if (result := self._run_inline(job, request)) is not None:
                    self._pending[request.id] = pending
                    pending.set_result(result)
                    continue
                deadline = None if request.deadline == NO_DEADLINE else request.deadline
                queued_job = QueuedJob(
                    *(job, pending, request.priority, request.enqueued_at, deadline),
                    request.tenant,
                )
                pending.queued_job = queued_job
                queued_jobs.append(queued_job)
                self._pending[request.id] = pending
            except Exception as error:
                self.send_error(request.id, error)
        if queued_jobs:
            failures = self._engine.enqueue(queued_jobs)
            for queued_job, failure in zip(queued_jobs, failures, strict=True):
                if failure is not None:
                    queued_job.future.set_exception(failure)
        self._flush()  # the results of small jobs

    def _view_inputs(self, request: JobRequest, plan: Plan) -> np.ndarray:
        return self._shared_memory.view(self._index, request.inputs_offset, input_bytes(plan))

    def _run_inline(self, job: Job, request: JobRequest) -> Result | None:
        """Runs a small job at once, unless the engine forms batches or it is late.

        On a CPU, the way to the device thread and back takes as long as a small job.
        """
        if self._engine.forms_batches or request.deadline <= time.perf_counter():
            return None
        return self._engine.run_inline(job, request.enqueued_at)

    def send_result(self, pending: PendingJob, result: Result) -> None:
        """Copies the outputs of a job into shared memory, and sends its times."""
        if pending.plan.output_layout.size > _LARGE_BYTES:
            task = asyncio.create_task(self._send_large_result(pending, result))
            self._reply_tasks.add(task)
            task.add_done_callback(self._reply_tasks.discard)
            return
        try:
            self._write_outputs(pending, result)
        except Exception as error:
            self.send_error(pending.request.id, error)
        else:
            self._send_times(pending, result)

    async def _send_large_result(self, pending: PendingJob, result: Result) -> None:
        failure = None
        try:
            await asyncio.to_thread(self._write_outputs, pending, result)
        except Exception as error:
            failure = error
        if self._pending.get(pending.request.id) is not pending:  # the worker has exited
            return
        if failure is None:
            self._send_times(pending, result)
        else:
            self.send_error(pending.request.id, failure)

    def _write_outputs(self, pending: PendingJob, result: Result) -> None:
        layout, offset = pending.plan.output_layout, pending.request.outputs_offset
        layout.write(
            result.outputs, self._shared_memory.view(self._index, offset, layout.size).data
        )

    def _send_times(self, pending: PendingJob, result: Result) -> None:
        """Sends the times of a job at the end of this turn of the event loop."""
        id = pending.request.id
        del self._pending[id]
        if not self._results:
            asyncio.get_running_loop().call_soon(self._flush)
        self._results[result.backend, result.notes].append(pack_result(id, result))

    def _flush(self) -> None:
        """Sends the results that are not sent yet: one frame for each backend."""
        if self._channel is not None:
            for (backend, notes), times in self._results.items():
                self._channel.send(MessageType.RESULTS, pack_results(backend, notes, times))
        self._results.clear()

    def send_error(self, id: int, error: Exception) -> None:
        """Sends the error of a job."""
        self._pending.pop(id, None)
        if self._channel is not None:
            self._channel.send(MessageType.ERROR, pack_id(id) + _encode_error(error))

    def _cancel(self, pending: PendingJob) -> None:
        """Cancels a job; sends RELEASED once the device does not read its inputs any more."""
        del self._pending[pending.request.id]
        if pending.queued_job is not None:
            self._engine.remove(pending.queued_job)
        pending.cancel()
        self._cancelled_count += 1
        on_released = partial(self._on_released, self._channel, pending.request.id)
        loop = asyncio.get_running_loop()

        def on_finalized() -> None:
            with suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(on_released)

        weakref.finalize(pending.inputs, on_finalized).atexit = False

    def _on_released(self, channel: Channel | None, id: int) -> None:
        self._cancelled_count -= 1
        if channel is not None and channel is self._channel:
            channel.send(MessageType.RELEASED, pack_id(id))

    def _on_connection_lost(self, channel: Channel) -> None:
        """Cancels the jobs of a worker that has exited."""
        if channel is self._channel:
            self._results.clear()
            for pending in list(self._pending.values()):
                self._cancel(pending)
            self._on_lost()


def _encode_error(error: Exception) -> bytes:
    """Encodes an error for the worker; logs it if it is a bug."""
    if not isinstance(error, QkvError):
        _log.error("a job could not be decoded, or its result could not be sent", exc_info=error)
        error = Internal("the computation failed")
    is_stopped = isinstance(error, EngineStopped)
    return orjson.dumps([error.status, error.problem(), error.retry_after or 1, is_stopped])
