"""The device process's connection to one worker: receives jobs, runs them, sends their results."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import orjson

from qkv.engine.device_errors import EngineStopped
from qkv.engine.engine import Engine
from qkv.engine.remote.channel import Channel
from qkv.engine.remote.job_memory import layouts_of
from qkv.engine.remote.messages import (
    JobRequest,
    MessageType,
    pack_id,
    pack_result,
    pack_results,
    unpack_id,
)
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.engine.remote.worker_job import WorkerJob
from qkv.errors import Internal, QkvError
from qkv.jobs.plan_cache import PlanCache
from qkv.jobs.result import Result

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
        plans: those of all workers.
        on_lost: called when the worker has exited.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        shared_memory: SharedMemory,
        plans: PlanCache,
        on_lost: Callable[[], None],
    ) -> None:
        self._index = index
        self._engine, self._shared_memory, self._plans = engine, shared_memory, plans
        self._on_lost = on_lost
        self._pending: dict[int, WorkerJob] = {}
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
            job = self._pending.get(unpack_id(payload)[0])
            if job is not None and not job.is_done:
                self._cancel(job)

    def _run_jobs(self, requests: Sequence[JobRequest]) -> None:
        """Submits the jobs of a frame to the engine."""
        jobs = []
        for request in requests:
            try:
                plan = self._plans.decode(request.plan)
                inputs = self._shared_memory.view(
                    self._index, request.inputs_offset, layouts_of(plan).input_bytes
                )
                job = self._pending[request.id] = WorkerJob(self, request, plan, inputs)
            except Exception as error:
                self.send_error(request.id, error)
            else:
                jobs.append(job)
        self._engine.submit_all(jobs)

    def send_result(self, job: WorkerJob, result: Result) -> None:
        """Copies the outputs of a job into shared memory, and sends its times."""
        if layouts_of(job.plan).outputs.size > _LARGE_BYTES:
            task = asyncio.create_task(self._send_large_result(job, result))
            self._reply_tasks.add(task)
            task.add_done_callback(self._reply_tasks.discard)
            return
        try:
            self._write_outputs(job, result)
        except Exception as error:
            self.send_error(job.id, error)
        else:
            self._send_times(job, result)

    async def _send_large_result(self, job: WorkerJob, result: Result) -> None:
        failure = None
        try:
            await asyncio.to_thread(self._write_outputs, job, result)
        except Exception as error:
            failure = error
        if self._pending.get(job.id) is not job:  # the worker has exited
            return
        if failure is None:
            self._send_times(job, result)
        else:
            self.send_error(job.id, failure)

    def _write_outputs(self, job: WorkerJob, result: Result) -> None:
        layout = layouts_of(job.plan).outputs
        memory = self._shared_memory.view(self._index, job.outputs_offset, layout.size)
        layout.write(result.outputs, memory.data)

    def _send_times(self, job: WorkerJob, result: Result) -> None:
        """Sends the times of a job at the end of this turn of the event loop; at once if no other
        job is here."""
        del self._pending[job.id]
        if not self._results and self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._results[result.backend, result.notes].append(pack_result(job.id, result))
        if not self._pending:
            self._flush()

    def _flush(self) -> None:
        """Sends the results that are not sent yet: one frame for each backend."""
        if self._channel is not None:
            for (backend, notes), times in self._results.items():
                self._channel.send(MessageType.RESULTS, pack_results(backend, notes, times))
        self._results.clear()

    def send_error(self, id: int, error: BaseException) -> None:
        """Sends the error of a job."""
        self._pending.pop(id, None)
        if self._channel is not None:
            self._channel.send(MessageType.ERROR, pack_id(id) + _encode_error(error))

    def _cancel(self, job: WorkerJob) -> None:
        """Cancels a job; sends RELEASED once the device does not read its inputs any more."""
        del self._pending[job.id]
        job.cancel()
        self._engine.remove(job)
        self._cancelled_count += 1
        on_released = partial(self._on_released, self._channel, job.id)
        loop = asyncio.get_running_loop()

        def on_finalized() -> None:
            with suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(on_released)

        weakref.finalize(job.inputs, on_finalized).atexit = False

    def _on_released(self, channel: Channel | None, id: int) -> None:
        self._cancelled_count -= 1
        if channel is not None and channel is self._channel:
            channel.send(MessageType.RELEASED, pack_id(id))

    def _on_connection_lost(self, channel: Channel) -> None:
        """Cancels the jobs of a worker that has exited."""
        if channel is self._channel:
            self._results.clear()
            for job in list(self._pending.values()):
                self._cancel(job)
            self._on_lost()


def _encode_error(error: BaseException) -> bytes:
    """Encodes an error for the worker; logs it if it is a bug."""
    if not isinstance(error, QkvError):
        _log.error("a job could not be decoded, or its result could not be sent", exc_info=error)
        error = Internal("the computation failed")
    is_stopped = isinstance(error, EngineStopped)
    return orjson.dumps([error.status, error.problem(), error.retry_after or 1, is_stopped])
