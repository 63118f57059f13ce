"""The process that owns the device: runs the jobs that workers write into shared memory.

The supervisor forks it and calls `DeviceProcess.run`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import orjson

from qkv.engine.engine import Engine
from qkv.engine.remote import job_codec
from qkv.engine.remote.channel import Channel, JobRequest, MessageType, receive_connection
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.engine.warmup import warm_up
from qkv.engine.work_queue import JobResult
from qkv.errors import Internal, QkvError, ServiceUnavailable
from qkv.jobs.job import Limits
from qkv.telemetry.worker_state import WorkerState

__all__ = ["DeviceProcess"]

_log = logging.getLogger("qkv.device")

_LARGE_BYTES: Final = 1 << 20  # larger outputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.01


class DeviceProcess:
    """Runs the jobs of all workers, so that jobs of different workers form batches.

    Args:
        engine: runs the jobs.
        worker: this process's row of the shared state.
        shared_memory: holds the tensors.
        limits: limits of each job.
        control_socket: receives a worker's index and one end of a socket pair when it starts.
        parent_alive_fd: reads end of file once the supervisor has exited.
    """

    def __init__(
        self,
        engine: Engine,
        worker: WorkerState,
        shared_memory: SharedMemory,
        limits: Limits,
        control_socket: socket.socket,
        parent_alive_fd: int,
    ) -> None:
        self._engine, self._worker = engine, worker
        self._control_socket, self._parent_alive_fd = control_socket, parent_alive_fd
        decoder = job_codec.JobDecoder(limits)
        self._links = [
            WorkerLink(index, engine, shared_memory, decoder, self._end_if_orphaned)
            for index in range(len(worker.shared_state))
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = asyncio.Event()
        self._is_orphan = False

    async def run(self) -> bool:
        """Runs jobs until SIGTERM, or until supervisor and workers have exited; sends all results.

        Returns:
            True if the device works. A permanent failure of the device ends the run too.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._is_ending.set)
        self._engine.start()
        heartbeat = asyncio.create_task(self._worker.run_heartbeat(self._engine.usage))
        failure_watch = asyncio.create_task(self._end_on_failure())
        await warm_up(self._engine)
        self._engine.accounting.stats_recorder = self._worker.stats_recorder
        self._worker.set_usage(self._engine.usage())
        loop.add_reader(self._parent_alive_fd, self._on_parent_exit)
        loop.add_reader(self._control_socket, self._on_new_connection)
        self._worker.set_ready(True)
        await self._is_ending.wait()
        self._worker.set_ready(False)
        await self._engine.stop()
        for link in self._links:
            await link.close()
        heartbeat.cancel()
        failure_watch.cancel()
        return not self._engine.failed.is_set()

    async def _end_on_failure(self) -> None:
        await self._engine.failed.wait()
        self._is_ending.set()

    def _on_new_connection(self) -> None:
        """Connects a worker that has started."""
        if (connection := receive_connection(self._control_socket)) is None:
            asyncio.get_running_loop().remove_reader(self._control_socket)
            return
        index, end = connection
        task = asyncio.create_task(self._links[index].open(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_parent_exit(self) -> None:
        """Ends the run once all workers have exited; each exits after its last response."""
        asyncio.get_running_loop().remove_reader(self._parent_alive_fd)
        self._is_orphan = True
        self._end_if_orphaned()

    def _end_if_orphaned(self) -> None:
        """Ends the run if the supervisor and all workers have exited."""
        if self._is_orphan and not any(link.is_connected for link in self._links):
            self._is_ending.set()


class PendingJob(NamedTuple):
    """A worker's job whose result is not sent yet.

    Attributes:
        request: the received request.
        inputs: bytes of its tensors; the job refers to them as long as the device may read them.
        future: future of its result.
    """

    request: JobRequest
    inputs: np.ndarray
    future: asyncio.Future[JobResult]


class WorkerLink:
    """The connection to one worker, and its pending jobs.

    A restarted worker takes over the memory region of the previous one. READY is sent once this
    process no longer reads or writes that region for the previous worker.

    Args:
        index: index of the worker.
        engine: runs its jobs.
        shared_memory: holds its tensors.
        decoder: decodes its jobs.
        on_lost: called when the worker has exited.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        shared_memory: SharedMemory,
        decoder: job_codec.JobDecoder,
        on_lost: Callable[[], None],
    ) -> None:
        self._index = index
        self._engine, self._shared_memory, self._decoder = engine, shared_memory, decoder
        self._on_lost = on_lost
        self._pending: dict[int, PendingJob] = {}
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
        channel.send(MessageType.READY)

    async def close(self) -> None:
        """Sends all results, and waits until the channel is closed."""
        await asyncio.sleep(0)  # for results that the engine has just resolved
        await asyncio.gather(*self._reply_tasks)
        if self._channel is not None and self.is_connected:
            self._channel.close()
            await self._channel.closed.wait()

    def _on_message(self, kind: MessageType, request_id: int, payload: bytes) -> None:
        """Handles a frame of the worker."""
        if kind == MessageType.CANCEL:
            if (job := self._pending.get(request_id)) is not None and job.future.cancel():
                self._release_when_unused(request_id)
            return
        try:
            self._submit(request_id, JobRequest.unpack(payload))
        except Exception as error:
            self._send(request_id, *_encode_error(error))

    def _submit(self, request_id: int, request: JobRequest) -> None:
        inputs = self._shared_memory.view(self._index, request.inputs_offset, request.inputs_bytes)
        future = self._engine.submit(
            self._decoder.decode(request.header, inputs),
            priority=request.priority,
            wait_s=request.wait_s,
            enqueued_at=request.enqueued_at,
        )
        self._pending[request_id] = PendingJob(request, inputs, future)
        future.add_done_callback(partial(self._on_done, request_id))

    def _on_done(self, request_id: int, future: asyncio.Future[JobResult]) -> None:
        job = self._pending.get(request_id)
        if job is None or job.future is not future or future.cancelled():
            return
        if future.exception() is None and job.request.outputs_bytes > _LARGE_BYTES:
            task = asyncio.create_task(self._reply_large(request_id, job))
            self._reply_tasks.add(task)
            task.add_done_callback(self._reply_tasks.discard)
        else:
            del self._pending[request_id]
            self._send(request_id, *self._build_reply(job))

    async def _reply_large(self, request_id: int, job: PendingJob) -> None:
        reply = await asyncio.to_thread(self._build_reply, job)
        if self._pending.get(request_id) is job:  # else the worker has exited
            del self._pending[request_id]
            self._send(request_id, *reply)

    def _build_reply(self, job: PendingJob) -> tuple[MessageType, bytes]:
        """Copies the outputs into shared memory; returns the type and payload of the reply."""
        try:
            result, request = job.future.result(), job.request
            tensors = result.outputs.values()
            target = self._shared_memory.view(
                self._index, request.outputs_offset, request.outputs_bytes
            )
            slices = job_codec.aligned_slices(t.nbytes for t in tensors)
            for where, tensor in zip(slices, tensors, strict=True):
                target[where] = np.frombuffer(tensor.data, np.uint8)
            return MessageType.RESULT, orjson.dumps([list(result.outputs), result.timing])
        except Exception as error:
            return _encode_error(error)

    def _send(self, request_id: int, kind: MessageType, payload: bytes) -> None:
        if self._channel is not None:
            self._channel.send(kind, request_id, payload)

    def _release_when_unused(self, request_id: int) -> None:
        """Sends RELEASED once the device does not read a cancelled job's inputs any more."""
        inputs = self._pending.pop(request_id).inputs
        self._cancelled_count += 1
        on_released = partial(self._on_released, self._channel, request_id)
        loop = asyncio.get_running_loop()

        def on_finalized() -> None:
            with suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(on_released)

        weakref.finalize(inputs, on_finalized).atexit = False

    def _on_released(self, channel: Channel | None, request_id: int) -> None:
        self._cancelled_count -= 1
        if channel is not None and channel is self._channel:
            channel.send(MessageType.RELEASED, request_id)

    def _on_connection_lost(self, channel: Channel) -> None:
        """Cancels the jobs of a worker that has exited."""
        if channel is self._channel:
            for request_id, job in list(self._pending.items()):
                job.future.cancel()
                self._release_when_unused(request_id)
            self._on_lost()


def _encode_error(error: Exception) -> tuple[MessageType, bytes]:
    """Encodes an error for the worker; logs it if it is a bug."""
    if not isinstance(error, QkvError):
        _log.error("a job could not be decoded, or its result could not be sent", exc_info=error)
        error = Internal("the computation failed")
    retry_after = error.retry_after if isinstance(error, ServiceUnavailable) else 1
    return MessageType.ERROR, orjson.dumps([error.status, error.problem(), retry_after])
