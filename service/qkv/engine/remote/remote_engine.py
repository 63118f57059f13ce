"""The engine of a worker without a device: the device process runs its jobs.

To endpoints it is an `Engine`. Input tensors are written once, into memory that both share; the
outputs are read from there.
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
import torch

from qkv.engine.accounting import InlineRun
from qkv.engine.admission import AdmissionController
from qkv.engine.engine import DEFAULT_LIMIT
from qkv.engine.executor import PreparedRun
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

_LARGE_BYTES: Final = 1 << 20  # more is not copied on the event loop
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
        """The work that it asks for."""
        return Load(1, self.inputs.bytes.nbytes + self.outputs.bytes.nbytes, self.job.flops)


class RemoteEngine:
    """Has jobs run by the device process.

    A job that was taken gets its result, or fails with ServiceUnavailable if the device process
    ends. Cancelling its future before it runs removes it from the device process's queue. Its
    memory is free again once the device process says that it does not read it any more.

    Args:
        device: the one that runs the jobs; not used in this process.
        region: where tensors go.
        control_socket: brings one end of a socket pair whenever the device process starts.
        shared_state: says when the service drains.
        limit: what may be submitted and not done.

    Attributes:
        admission: admits requests before their bodies are read.
        failed: never set: the device is not in this process.
    """

    def __init__(
        self,
        device: torch.device,
        region: WorkerRegion,
        control_socket: socket.socket,
        shared_state: SharedState,
        limit: Load = DEFAULT_LIMIT,
    ) -> None:
        self.device = device
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
        """Waits for the device process; to be called on the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control_socket, self._on_new_connection)

    async def wait_until_ready(self) -> None:
        """Returns once jobs are taken, or the service drains."""
        while not self._is_connected.is_set() and not self._shared_state.is_draining:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_connected.wait(), _POLL_S)

    async def stop(self) -> None:
        """Takes no more jobs, and awaits the results of those that were taken."""
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
        """True while jobs are taken."""
        return self._is_connected.is_set() and not self._closing

    def usage(self) -> Usage:
        """Returns zeros: the device process counts what is queued."""
        return Usage()

    def can_run_inline(self, _job: Job) -> bool:
        """Returns False: no job runs in this process."""
        return False

    def run_prepared(self, _prepared_run: PreparedRun) -> InlineRun | None:
        """Returns None: no job runs in this process."""
        return None

    def run_inline(self, _job: Job) -> JobResult | None:
        """Returns None: no job runs in this process."""
        return None

    def submit(
        self, job: Job, *, priority: int = 0, wait_s: float | None = None
    ) -> asyncio.Future[JobResult]:
        """Submits a job, as `Engine.submit` does.

        Raises:
            ServiceUnavailable: there is no room for it, the device process starts again, or this
                one stops.
        """
        assert self._loop is not None
        if self._closing:
            raise ServiceUnavailable("the service is stopping", retry_after=5)
        if not self._is_connected.is_set():
            raise ServiceUnavailable("the process that runs attention starts again")
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
        except Exception as error:  # ours to fix; its client must not wait for ever
            if not submitted.future.done():
                submitted.future.set_exception(error)
        if submitted.future.done():  # or it was cancelled, or the device process has ended
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
        """Counts a job no more; sends CANCEL if it was cancelled. Only the device process knows
        when it does not read the inputs any more."""
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
            self._loop.remove_reader(
                self._control_socket
            )  # that the parent ended is seen elsewhere
            return
        if self._channel is not None:  # that the one before has ended may not have been seen yet
            self._channel.close()
            self._on_connection_lost(self._channel)
        channel = self._channel = Channel(
            self._on_message, lambda: self._on_connection_lost(channel)
        )
        # kept, for a task that nothing refers to may vanish
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
                submitted.future.set_exception(
                    ServiceUnavailable("the process that runs attention has ended")
                )


def _read_outputs(submitted: _SubmittedJob, names: list[str]) -> dict[str, RawTensor]:
    """Returns the outputs, as views of where the device process has written them."""
    specs, data = submitted.job.output_specs, submitted.outputs.bytes.data
    slices = job_codec.aligned_slices(job_codec.output_sizes(submitted.job, names))
    return {
        name: RawTensor(*specs[name], data[where])
        for name, where in zip(names, slices, strict=True)
    }
