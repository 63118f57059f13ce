"""The engine of a worker without a device: the device process runs its jobs.

It has the interface of `Engine`. It writes input tensors once, into memory shared with the device
process, and reads the outputs there.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import orjson

from qkv.engine.admission import AdmissionController
from qkv.engine.engine import DEFAULT_LIMIT
from qkv.engine.remote import job_codec
from qkv.engine.remote.channel import Channel, JobRequest, MessageType, receive_connection
from qkv.engine.remote.shared_memory import Block, WorkerRegion
from qkv.engine.work_queue import JobResult, Load, ThroughputEstimate
from qkv.errors import ServiceUnavailable, from_problem
from qkv.jobs.job import Job
from qkv.telemetry.metrics import Usage
from qkv.telemetry.worker_state import SharedState
from qkv.tensors import RawTensor

__all__ = ["RemoteEngine"]

_LARGE_BYTES: Final = 1 << 20  # larger inputs are copied in a thread, not on the event loop
_POLL_S: Final = 0.05


@dataclass(slots=True, eq=False)
class _SubmittedJob:
    job: Job
    future: asyncio.Future[JobResult]
    inputs: Block
    outputs: Block
    priority: int
    wait_s: float | None
    enqueued_at: float = field(default_factory=time.perf_counter)
    is_sent: bool = False

    @property
    def load(self) -> Load:
        """The work of the job."""
        return Load(1, self.inputs.bytes.nbytes + self.outputs.bytes.nbytes, self.job.flops)


class RemoteEngine:
    """Sends jobs to the device process.

    A submitted job gets its result, or fails with ServiceUnavailable if the device process ends.
    Cancelling its future before it runs removes it from the device process's queue. Its memory is
    free again once the device process sends that it no longer reads it.

    Args:
        device_name: of the device of the device process.
        region: memory for tensors.
        control_socket: receives one end of a socket pair whenever the device process starts.
        shared_state: has the flag that the service drains.
        limit: the most load of unfinished jobs.

    Attributes:
        admission: admits requests before their bodies are read.
        failed: never set: the device is not in this process.
    """

    def __init__(
        self,
        device_name: str,
        region: WorkerRegion,
        control_socket: socket.socket,
        shared_state: SharedState,
        limit: Load = DEFAULT_LIMIT,
    ) -> None:
        self.device_name = device_name
        self._region = region
        self._control_socket = control_socket
        self._shared_state = shared_state
        self._ids = itertools.count(1)
        self._submitted: dict[int, _SubmittedJob] = {}
        self._load = Load()
        self._throughput = ThroughputEstimate()
        self._last_result_at = 0.0  # by time.perf_counter
        self.admission = AdmissionController(
            limit, lambda: self._load, self._throughput.retry_after
        )
        self.failed = asyncio.Event()
        self._copy_tasks: set[asyncio.Task[None]] = set()
        self._channel: Channel | None = None
        self._is_connected = asyncio.Event()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Waits for the device process; call it on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control_socket, self._on_new_connection)

    async def wait_until_ready(self) -> None:
        """Waits until the device process accepts jobs, or the service drains."""
        while not self._is_connected.is_set() and not self._shared_state.is_draining:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_connected.wait(), _POLL_S)

    async def stop(self) -> None:
        """Rejects new jobs, and awaits the results of submitted jobs."""
        self._closing = True
        while futures := [s.future for s in self._submitted.values() if not s.future.done()]:
            await asyncio.wait(futures)
        assert self._loop is not None
        self._loop.remove_reader(self._control_socket)
        if self._channel is not None:
            self._channel.close()

    @property
    def is_alive(self) -> bool:
        """Always true: the supervisor restarts the device process."""
        return True

    @property
    def is_ready(self) -> bool:
        """True while the device process accepts jobs and this engine is not stopping."""
        return self._is_connected.is_set() and not self._closing

    def usage(self) -> Usage:
        """Returns zeros: the device process counts its queue."""
        return Usage()

    def run_inline(self, _job: Job) -> JobResult | None:
        """Returns None: no job runs in this process."""
        return None

    async def run_with_others(self, _job: Job) -> JobResult | None:
        """Returns None, as `run_inline`."""
        return None

    def submit(
        self, job: Job, *, priority: int = 0, wait_s: float | None = None
    ) -> asyncio.Future[JobResult]:
        """Submits a job, as `Engine.submit` does.

        Raises:
            ServiceUnavailable: the shared memory is full, the device process is restarting, or
                this process is stopping.
        """
        assert self._loop is not None
        if self._closing:
            raise ServiceUnavailable("the service is stopping", retry_after=5)
        if not self._is_connected.is_set():
            raise ServiceUnavailable("the device process is restarting")
        try:
            inputs = self._region.allocate(job_codec.aligned_bytes(job_codec.input_sizes(job)))
            outputs = self._region.allocate(job_codec.aligned_bytes(job_codec.output_sizes(job)))
        except ServiceUnavailable as full:
            full.retry_after = self._throughput.retry_after(self._load)
            raise
        submitted = _SubmittedJob(
            job, self._loop.create_future(), inputs, outputs, priority, wait_s
        )
        request_id = next(self._ids)
        self._submitted[request_id] = submitted
        self._load = self._load.plus(submitted.load)
        submitted.future.add_done_callback(partial(self._on_done, request_id, submitted.load))
        if inputs.bytes.nbytes <= _LARGE_BYTES:
            job_codec.write_tensors(job, inputs.bytes)
            self._send(request_id, submitted)
        else:
            task = self._loop.create_task(self._send_large(request_id, submitted))
            self._copy_tasks.add(task)
            task.add_done_callback(self._copy_tasks.discard)
        return submitted.future

    async def _send_large(self, request_id: int, submitted: _SubmittedJob) -> None:
        try:
            await asyncio.to_thread(job_codec.write_tensors, submitted.job, submitted.inputs.bytes)
        except Exception as error:  # a bug; its client must not wait for ever
            if not submitted.future.done():
                submitted.future.set_exception(error)
        if submitted.future.done():  # failed, cancelled, or the device process has ended
            self._submitted.pop(request_id, None)
        else:
            self._send(request_id, submitted)

    def _send(self, request_id: int, submitted: _SubmittedJob) -> None:
        assert self._channel is not None
        inputs, outputs = submitted.inputs, submitted.outputs
        request = JobRequest(
            inputs.offset,
            inputs.bytes.nbytes,
            outputs.offset,
            outputs.bytes.nbytes,
            max(0, min(submitted.priority, 255)),
            submitted.enqueued_at,
            submitted.wait_s,
            job_codec.encode_header(submitted.job),
        )
        submitted.is_sent = True
        self._channel.send(MessageType.RUN, request_id, request.pack())

    def _on_done(self, request_id: int, load: Load, future: asyncio.Future[JobResult]) -> None:
        """Stops counting a job; sends CANCEL if it was cancelled. Its memory stays allocated: only
        the device process knows when it no longer reads the inputs."""
        self._load = self._load.minus(load)
        submitted = self._submitted.get(request_id)
        if submitted is not None and future.cancelled() and submitted.is_sent:
            assert self._channel is not None
            self._channel.send(MessageType.CANCEL, request_id)

    def _on_message(self, kind: MessageType, request_id: int, payload: bytes) -> None:
        """Handles a frame of the device process."""
        if kind == MessageType.READY:
            self._is_connected.set()
            return
        submitted = self._submitted.pop(request_id)
        if submitted.future.done():  # it was cancelled
            return
        if kind == MessageType.RESULT:
            now = time.perf_counter()
            started_at = max(submitted.enqueued_at, self._last_result_at)
            self._throughput.add(submitted.load, now - started_at)
            self._last_result_at = now
            names, timing = orjson.loads(payload)
            submitted.future.set_result(JobResult(_read_outputs(submitted, names), timing))
        else:
            status, problem, retry_after = orjson.loads(payload)
            submitted.future.set_exception(from_problem(status, problem, retry_after))

    def _on_new_connection(self) -> None:
        """Connects a device process that has started."""
        assert self._loop is not None
        if (connection := receive_connection(self._control_socket)) is None:
            # the supervisor has exited: `parent_alive_fd` ends this worker
            self._loop.remove_reader(self._control_socket)
            return
        if self._channel is not None:  # the loss of the previous one may not be seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        # keep a reference: a task without one may be collected
        self._opening = self._loop.create_task(channel.open(connection[1]))

    def _on_connection_lost(self, channel: Channel) -> None:
        """Fails all jobs: the device process has ended."""
        if channel is not self._channel:
            return
        self._channel = None
        self._is_connected.clear()
        submitted_jobs = list(self._submitted.values())
        self._submitted.clear()
        for submitted in submitted_jobs:
            if not submitted.future.done():
                submitted.future.set_exception(ServiceUnavailable("the device process has ended"))


def _read_outputs(submitted: _SubmittedJob, names: list[str]) -> dict[str, RawTensor]:
    """Returns the outputs, as views of the memory that the device process has written."""
    specs, data = submitted.job.output_specs, submitted.outputs.bytes.data
    slices = job_codec.aligned_slices(job_codec.output_sizes(submitted.job, names))
    return {
        name: RawTensor(*specs[name], data[where])
        for name, where in zip(names, slices, strict=True)
    }
